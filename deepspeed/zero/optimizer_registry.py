"""Build optimizers from the `optimizer` section of a config, and set the parameter and group flags they read.

Built-in names are case-insensitive; every other name is a class of `torch.optim`. `config/optimizers.py` validates
the section.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepspeed.base.sharded import full_shape
from deepspeed.checkpoint.placement import placement_of
from deepspeed.config import optimizers
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.optim.elementwise import is_elementwise
from deepspeed.zero.placements import STACKED

__all__ = ["build_optimizer", "is_elementwise", "set_optimizer_flags", "set_state_dtype"]

OptimizerClass = Callable[..., torch.optim.Optimizer]


def imported(path: str) -> OptimizerClass:
    """Import the class at a ``BuiltIn.path``."""
    module, name = path.split(":")
    return getattr(importlib.import_module(f"deepspeed.{module}"), name)


_FUSED_ADAM, _HOST_ADAM = optimizers.BUILT_IN["adam"].path, str(optimizers.BUILT_IN["adam"].host_path)


def build_optimizer(
    name: str, params: dict[str, Any] | None, param_groups: Any, *, on_host: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer of `{"type": name, "params": params}` on `param_groups` (as for torch.optim). `on_host`:
    its update runs on the host (ZeRO-Offload).

    Raises:
        DeepSpeedConfigError: unknown or unavailable name, unknown parameter, or a value out of range; all
            problems at once.
    """
    problems = optimizers.check_optimizer(name, params)
    if problems:
        raise DeepSpeedConfigError("; ".join(problems))
    settings = optimizers.settings_of(params)
    cls = _resolve(name, settings, on_host)
    try:
        return cls(param_groups, **settings)
    except (TypeError, ValueError) as error:
        raise DeepSpeedConfigError(f"optimizer.params do not fit optimizer.type={name!r}: {error}") from error


def _resolve(name: str, settings: dict[str, Any], on_host: bool) -> OptimizerClass:
    """Return the class for a valid section; removes keys from `settings` that the class does not take."""
    key = name.lower()
    built_in = optimizers.BUILT_IN.get(key)
    if built_in is None:
        return getattr(torch.optim, optimizers.torch_name(name) or name)
    if key in optimizers.TORCH_COUNTERPARTS and not settings.keys() <= built_in.arguments:
        return getattr(torch.optim, optimizers.TORCH_COUNTERPARTS[key])
    host_path = built_in.host_path if on_host else None
    if built_in.path == _FUSED_ADAM:
        return _adam(key, settings, on_host=host_path is not None)
    if host_path is not None:
        settings.pop("set_grad_none", None)
        return imported(host_path)
    return imported(built_in.path)


def _adam(key: str, settings: dict[str, Any], *, on_host: bool) -> OptimizerClass:
    decoupled = bool(settings.pop("adam_w_mode", True)) or key == "adamw"
    fp32_states = settings.pop("fp32_optimizer_states", True)
    compact = {key: settings.pop(key) for key in optimizers.COMPACT_KEYS if key in settings}
    if settings.pop("torch_adam", False):
        settings.pop("bias_correction", None)
        return torch.optim.AdamW if decoupled else torch.optim.Adam
    if compact.get("state_bits", 32) == 8 or compact.get("stochastic_rounding"):
        settings.pop("set_grad_none", None)
        settings.update({"state_bits": 32, **compact}, adam_w_mode=decoupled)
        return imported("ops.adam.compact_adam:CompactAdam")
    if on_host or not fp32_states:
        settings.update(adamw_mode=decoupled, fp32_optimizer_states=fp32_states)
        settings.pop("set_grad_none", None)
        return imported(_HOST_ADAM)
    settings["adam_w_mode"] = decoupled
    return imported(_FUSED_ADAM)


_NOT_MATRICES = ("embed", "lm_head")

# Attention projections whose outputs are concatenated heads, by the last part of their names.
_OF_QUERIES = ("q_proj", "query", "wq", "q_b_proj", "kv_b_proj")
_OF_KEYS = ("k_proj", "key", "wk", "v_proj", "value", "wv")
_OF_BOTH = ("qkv_proj", "query_key_value")
"""Queries, keys and values in one matrix: in every layout, each head of each is a contiguous run of rows."""
_QUERY_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", *_QUERY_HEADS)
_HIDDEN = ("hidden_size", "n_embd", "d_model")


def set_optimizer_flags(config_class: Any, model: torch.nn.Module) -> None:
    """Set, for `optimizer.type` "muon", `param.use_muon`, true for hidden matrices (two or more dimensions, and
    neither `embed` nor `lm_head` in the name), and `param.muon_num_heads`: with `per_head_muon` the number of heads
    that an attention projection computes, from the model's config; else None. No effect for other optimizers.

    DeepSpeedConfigError: `per_head_muon` is set and no attention projection is found.
    """
    if (config_class.optimizer_name or "").lower() != "muon":
        return
    per_head = bool((getattr(config_class, "optimizer_params", None) or {}).get("per_head_muon"))
    found = False
    for name, param in model.named_parameters():
        flags = vars(param)
        matrix = len(full_shape(param)) - bool(flags.get(STACKED))  # a stack of vectors is no matrix
        flags["use_muon"] = matrix >= 2 and not any(part in name.lower() for part in _NOT_MATRICES)
        flags["muon_num_heads"] = _heads(name, param, model) if per_head and flags["use_muon"] else None
        found = found or flags["muon_num_heads"] is not None
    if per_head and not found:
        raise DeepSpeedConfigError(
            "optimizer.params.per_head_muon: no projection of attention was found by its name "
            f"({', '.join((*_OF_QUERIES, *_OF_KEYS, *_OF_BOTH))}) whose outputs are the heads in "
            f"{type(model).__name__}.config; leave it out, or rename the layers"
        )


def kind_of_group(group: Mapping[str, Any]) -> tuple[bool, int | None] | None:
    """Return the kind of parameters in a group of Muon: (matrices or others, number of heads); None: a group of
    another optimizer."""
    return (bool(group["use_muon"]), group.get("num_heads")) if "use_muon" in group else None


def kind_of_param(param: torch.nn.Parameter) -> tuple[bool, int | None]:
    """Return the kind (see ``kind_of_group``) that ``set_optimizer_flags`` gave the parameter."""
    return bool(getattr(param, "use_muon", False)), getattr(param, "muon_num_heads", None)


def _heads(name: str, param: torch.nn.Parameter, model: torch.nn.Module) -> int | None:
    """Return the number of heads in this rank's outputs of a matrix; None: it is no attention projection, or its
    shape does not fit."""
    shape = placement_of(param).global_shape
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    layer = name.removesuffix(".weight").rpartition(".")[2]
    queries, keys = _number(config, _QUERY_HEADS), _number(config, _KEY_HEADS)
    if queries is None or keys is None or len(shape) != 2:
        return None
    if layer in _OF_QUERIES:
        heads = queries
    elif layer in _OF_KEYS:
        heads = keys
    elif layer in _OF_BOTH:
        heads = queries + 2 * keys
    else:
        return None
    widths = _widths(layer, config, queries)
    fits = shape[0] in [heads * width for width in widths] if widths else shape[0] % heads == 0
    own, cut = divmod(heads * full_shape(param)[0], shape[0])  # tensor-parallel ranks share the heads
    return own if fits and not cut else None


def _widths(layer: str, config: Any, queries: int) -> list[int]:
    """Return the possible output widths of one head of the layer, from the config; empty if it does not say.

    Multi-head latent attention (DeepSeek-V2, 2024) has queries with a rotated and an unrotated part, from ``q_b_proj``
    or, where they are not compressed, from ``q_proj``; ``kv_b_proj`` makes unrotated keys and values.
    """
    plain, rotated = _number(config, ["qk_nope_head_dim"]), _number(config, ["qk_rope_head_dim"])
    value, hidden = _number(config, ["v_head_dim"]), _number(config, _HIDDEN)
    if layer == "kv_b_proj":
        return [plain + value] if plain and value else []
    latent = [plain + rotated] if plain and rotated else []
    if layer == "q_b_proj":
        return latent
    width = _number(config, ["head_dim"]) or (hidden // queries if hidden else None)
    return [*([width] if width else []), *(latent if layer == "q_proj" else [])]


def _number(config: Any, names: Sequence[str]) -> int | None:
    """Return the first of these attributes that is a positive int."""
    return next((n for name in names if isinstance(n := getattr(config, name, None), int) and n > 0), None)


def set_state_dtype(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
    """Make one of our optimizers keep its state in the dtype of the master weights, if the plan sets a 16-bit one."""
    if dtype in (None, torch.float32):
        return
    optimizer.defaults["fp32_optimizer_states"] = False
    for group in optimizer.param_groups:
        group["fp32_optimizer_states"] = False
