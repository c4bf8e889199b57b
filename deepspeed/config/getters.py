"""Documented functions that read one setting from a config dict as written: `get_gradient_clipping(param_dict)`.

A missing key has its documented default, from the schema. Nothing is validated here; `DeepSpeedConfig` does that.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from deepspeed.config.keys import constant_of, field_at, keys_of
from deepspeed.config.schema import TrainingConfig


def schema_default(*path: str) -> Any:
    """Return the documented default of a key; for a section, a dict of its keys' defaults."""
    field = field_at(TrainingConfig, path)
    assert field is not None, path
    value = field.get_default(call_default_factory=True)
    return None if value is PydanticUndefined else as_written(value)


def constant_of_key(name: str) -> Any:
    """Return a constant: `GRADIENT_CLIPPING` is the spelling of a top-level key, `GRADIENT_CLIPPING_DEFAULT` its
    documented default; `FP16_HYSTERESIS` and `FP16_HYSTERESIS_DEFAULT` are those of a section's key.

    AttributeError for any other name.
    """
    spellings = {key.upper(): key for key in keys_of(TrainingConfig)}
    key = name.removesuffix("_DEFAULT")
    if key in spellings:
        return spellings[key] if key == name else schema_default(spellings[key])
    sections = {prefix: keys_of(TrainingConfig)[own].section for prefix, own in _PREFIXES.items()}
    return constant_of(name, {prefix: section for prefix, section in sections.items() if section})


def constants_of_keys() -> list[str]:
    """Return all names that `constant_of_key` takes."""
    keys = keys_of(TrainingConfig)
    owned = ((prefix, section) for prefix, own in _PREFIXES.items() if (section := keys[own].section))
    names = [*keys, *(f"{prefix}_{key}" for prefix, section in owned for key in keys_of(section))]
    return [name.upper() + end for name in names for end in ("", "_DEFAULT")]


_PREFIXES = {
    "FP16": "fp16",
    "BFLOAT16": "bf16",
    "TORCH_AUTOCAST": "torch_autocast",
    "CHECKPOINT": "checkpoint",
    "ACT_CHKPT": "activation_checkpointing",
    "PLD": "progressive_layer_drop",
}
"""Prefix of constants -> section."""


def as_written(value: Any) -> Any:
    """Return a section as the dict that a user would write, with documented spellings."""
    if isinstance(value, Enum):
        return value.value
    if not isinstance(value, BaseModel):
        return value
    table = keys_of(type(value))
    spelling = {key.name: name for name, key in reversed(table.items())}
    return {spelling[name]: as_written(getattr(value, name)) for name in type(value).model_fields}


def read(param_dict: Mapping[str, Any], *path: str) -> Any:
    """Return the value at a path of a config, or its default."""
    found: Any = param_dict
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            return schema_default(*path)
        found = found[key]
    return found


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> Any:
    return read(param_dict, "gradient_clipping")


def get_log_level(param_dict: Mapping[str, Any]) -> Any:
    return read(param_dict, "log_level")


_LAYOUT = ("block", "different_layout_per_head")
_DIRECTED = ("attention", "horizontal_global_attention")
_BLOCKS_SEEN = ("global_block_indices", "global_block_end_indices")
_SPARSITY_KEYS = {
    "dense": ("block",),
    "fixed": (*_LAYOUT, "num_local_blocks", "num_global_blocks", *_DIRECTED, "num_different_global_patterns"),
    "variable": (*_LAYOUT, "num_random_blocks", "local_window_blocks", *_BLOCKS_SEEN, *_DIRECTED),
    "bigbird": (*_LAYOUT, "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"),
    "bslongformer": (*_LAYOUT, "num_sliding_window_blocks", *_BLOCKS_SEEN),
}


def get_sparse_attention(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the keys of `sparse_attention` that its mode uses, with defaults; None without the section."""
    sparsity = param_dict.get("sparse_attention")
    if sparsity is None:
        return None
    mode = get_sparse_attention_mode(sparsity)
    if mode not in _SPARSITY_KEYS:
        raise NotImplementedError(
            f"sparse_attention.mode={mode!r} is unknown: use one of {', '.join(_SPARSITY_KEYS)}"
        )
    return {"mode": mode} | {key: read(param_dict, "sparse_attention", key) for key in _SPARSITY_KEYS[mode]}


def get_sparse_attention_mode(param_dict: Mapping[str, Any]) -> str:
    """Return `mode` of a `sparse_attention` section, which is passed alone."""
    return read({"sparse_attention": param_dict}, "sparse_attention", "mode")
