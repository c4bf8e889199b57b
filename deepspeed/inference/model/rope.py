"""Read the RoPE base from a config, wherever the installed Transformers keeps it.

Before 5.0 a config has an attribute ``rope_theta``, and position scaling in ``rope_scaling``; since then both are in
``rope_parameters``, which may hold one dict per layer type instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SECTIONS = ("rope_parameters", "rope_scaling")
_UNSCALED = (None, "default")


def rope_theta(config: Any) -> float:
    """Return the RoPE base of a model's config. ValueError: it has none, or one per layer type, or it scales positions,
    which a base alone does not describe."""
    kind = scaled_rope(config)
    if kind is not None:
        raise ValueError(
            f"{type(config).__name__} has positions of rope_type={kind!r}, which a base alone cannot "
            "describe: use the model's own rotary embedding"
        )
    own = getattr(config, "rope_theta", None)
    if own is not None:
        return own
    for section in _sections(config):
        by_layer = {
            key: each["rope_theta"]
            for key, each in section.items()
            if isinstance(each, Mapping) and each.get("rope_theta") is not None
        }
        if len(set(by_layer.values())) > 1:
            raise ValueError(f"{type(config).__name__} has a different rope_theta per layer type: {by_layer}")
        if by_layer:
            return next(iter(by_layer.values()))
        if section.get("rope_theta") is not None:
            return section["rope_theta"]
    raise ValueError(f"{type(config).__name__} has no rope_theta, nor do rope_parameters or rope_scaling")


def scaled_rope(config: Any) -> str | None:
    """Return the type of position scaling ("linear", "yarn", ..); None: unscaled."""
    kinds = {each.get("rope_type", each.get("type")) for each in _flat(config)} - set(_UNSCALED)
    return min(kinds) if kinds else None


def _sections(config: Any) -> Iterator[Mapping[str, Any]]:
    found = (getattr(config, name, None) for name in _SECTIONS)
    return (each for each in found if isinstance(each, Mapping) and each)


def _flat(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the sections and the dicts nested in them."""
    for section in _sections(config):
        yield section
        yield from (each for each in section.values() if isinstance(each, Mapping))
