"""Registration of sequence-parallel attention with Transformers, and detection of models that bypass it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed.base.transformers_models import attention_registries, text_config
from deepspeed.parallel.sequence.hf.masks import mask_function_over, no_mask

NAME = "ulysses"
"""Name of the attention in Transformers' registries."""

_SHARDABLE = {"full_attention", "sliding_attention"}
_HAS_NO_BLOCKS = ("eager", "flex_attention")


@dataclass(frozen=True)
class AttentionTarget:
    """The model to register for, or the config of one that is not loaded yet."""

    name: str
    config: Any
    model: nn.Module | None = None
    layers: int | None = None
    """Number of layers that a forward runs; None: ``num_hidden_layers`` of the config."""

    @classmethod
    def of(cls, model_name_or_path: Any) -> AttentionTarget:
        """Create a target from a model, or the name or path of one. ValueError: a module without ``config``."""
        if isinstance(model_name_or_path, (str, os.PathLike)):
            from transformers import AutoConfig

            name = os.fspath(model_name_or_path)
            config = AutoConfig.from_pretrained(name)
            return cls(name, text_config(config))
        model = model_name_or_path
        if getattr(model, "config", None) is None:
            raise ValueError(
                f"{type(model).__name__} has no config: UlyssesSPAttentionHF supports Transformers models "
                "only; for others use deepspeed.parallel.sequence.layer.DistributedAttention"
            )
        return cls(type(model).__name__, text_config(model.config), model)

    @property
    def counts(self) -> dict[str, int]:
        """Its numbers of layers and heads, under the names of `UlyssesSPAttentionHF`'s arguments."""
        config, heads = self.config, int(self.config.num_attention_heads)
        return {
            "attn_head_count": heads,
            "attn_head_size": int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            "kv_head_count": int(getattr(config, "num_key_value_heads", None) or heads),
            "num_hidden_layers": int(config.num_hidden_layers),
        }

    def core_name(self, wanted: str | None) -> str:
        """Return the name of the local attention. ValueError: the model's differs or needs whole masks, or the model
        has layers that are no attention."""
        own = self.config._attn_implementation if self.model is not None else None
        own = None if own == NAME else own  # registered before
        core = wanted or own or "sdpa"
        if own not in (None, core):
            raise ValueError(
                f"core_attn_implementation={core!r} does not match model config attn_implementation={own!r} of "
                f"{self.name}: use the same for both"
            )
        if core in (*_HAS_NO_BLOCKS, NAME) or core.startswith("paged|"):
            raise ValueError(
                f"core_attn_implementation={core!r} cannot be the attention of one rank: load {self.name} with "
                "attn_implementation='sdpa', 'flash_attention_2' or 'flash_attention_3'"
            )
        other = sorted(set(getattr(self.config, "layer_types", None) or ()) - _SHARDABLE)
        if other:
            raise ValueError(
                f"{self.name} has layers of type {', '.join(other)}, which carry state along the sequence "
                "or depend on shard boundaries: sequence parallelism cannot shard them"
            )
        return core


def attention_function(name: str) -> Callable[..., Any]:
    """Return Transformers' attention of this name; a kernel of the Hub (``kernels-community/...``) is fetched.
    ValueError: there is none."""
    functions, _ = attention_registries("sequence parallelism of Transformers' models")
    if name not in functions.valid_keys():
        _fetch_kernel(name)
    if name not in functions.valid_keys():
        raise ValueError(
            f"core_attn_implementation={name!r} is not among {', '.join(sorted(functions.valid_keys()))}"
        )
    return _own(functions[name])


def _fetch_kernel(name: str) -> None:
    """Fetch and register a kernel of the Hub, which Transformers would do only when loading the first model that uses
    it. ValueError: it cannot be fetched. Releases of Transformers without that function leave it unregistered."""
    from transformers import modeling_flash_attention_utils

    load = getattr(modeling_flash_attention_utils, "lazy_import_flash_attention", None)
    if load is None or "/" not in name:
        return
    try:
        load(name)
    except (ImportError, ValueError, OSError) as problem:
        raise ValueError(f"core_attn_implementation={name!r} could not be loaded: {problem}") from problem


def register(attend: Callable[..., Any], core: str, target: AttentionTarget) -> None:
    """Register ``attend`` over ``core`` with Transformers under NAME, and set it on the model.

    A model given by name and loaded later looks up its attention as ``core`` (unless loaded with
    ``attn_implementation="ulysses"``). So ``attend`` also replaces ``core``, for every model of the process, until
    `unregister`.
    """
    functions, masks = attention_registries("sequence parallelism of Transformers' models")
    make = _own(masks[core]) if core in masks.valid_keys() else no_mask

    def ulysses_attention_forward(*args: Any, **kwargs: Any) -> Any:
        return attend(*args, **kwargs)

    make_mask = mask_function_over(make)
    functions.register(NAME, ulysses_attention_forward)
    masks.register(NAME, make_mask)
    if target.model is not None:
        target.config._attn_implementation = NAME
    if not isinstance(target.model, nn.Module):
        _stand_in(functions, core, ulysses_attention_forward, _own(functions[core]))
        _stand_in(masks, core, make_mask, make)


_STANDS_FOR = "_deepspeed_stands_for"
"""Attribute of a replacement function that holds Transformers' original."""


def _stand_in(registry: Any, name: str, ours: Callable[..., Any], own: Callable[..., Any]) -> None:
    setattr(ours, _STANDS_FOR, own)
    registry[name] = ours


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(function, _STANDS_FOR, function)


def is_sharded(name: str) -> bool:
    """Return whether the attention registered under this name is sequence-parallel."""
    functions, _ = attention_registries("sequence parallelism of Transformers' models")
    return name == NAME or (name in functions.valid_keys() and _own(functions[name]) is not functions[name])


def unregister() -> None:
    """Restore Transformers' attention under every name except NAME."""
    for registry in attention_registries("sequence parallelism of Transformers' models"):
        for name in set(registry.valid_keys()) - {NAME}:
            if _own(registry[name]) is not registry[name]:
                registry[name] = _own(registry[name])
