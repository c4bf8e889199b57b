"""Numbers for configs, and configs for numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def flatten(d: Mapping[str, Any], parent_key: str = "", sep: str = "_") -> dict[str, Any]:
    """Nested dicts as one, whose keys are joined by ``sep``."""
    flat: dict[str, Any] = {}
    for key, value in d.items():
        path = f"{parent_key}{sep}{key}" if parent_key else key
        flat |= flatten(value, path, sep) if isinstance(value, Mapping) else {path: value}
    return flat


def dict_to_feature(
    feature_dict: Mapping[str, Any], keys: Sequence[str], max_value: Mapping[str, float] | None = None
) -> list[float]:
    """The numbers of the keys, at any depth; texts and what is missing are 0, and with ``max_value`` each is divided by
    the largest of its key."""
    feature: list[float] = []
    for key, value in feature_dict.items():
        if isinstance(value, Mapping):
            feature += dict_to_feature(value, keys, max_value)
        elif key in keys:
            number = float(value) if isinstance(value, (int, float)) else 0.0
            largest = max_value.get(key) if max_value else None
            feature.append(number / largest if largest else number)
    return feature
