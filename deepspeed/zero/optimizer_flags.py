"""Flags on parameters and groups that an optimizer chosen by name reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.zero.placements import STACKED

_NOT_MATRICES = ("embed", "lm_head")

# Layers of attention whose outputs are heads one after the other, by the last part of their names.
_OF_QUERIES = ("q_proj", "query", "wq", "q_b_proj", "kv_b_proj")
_OF_KEYS = ("k_proj", "key", "wk", "v_proj", "value", "wv")
_OF_BOTH = ("qkv_proj", "query_key_value")
"""Queries, keys and values in one matrix: whichever way they are laid out, each head of each is a run of rows."""
_QUERY_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", *_QUERY_HEADS)
_HIDDEN = ("hidden_size", "n_embd", "d_model")


def set_optimizer_flags(config_class: Any, model: torch.nn.Module) -> None:
    """For `optimizer.type` "muon": set `param.use_muon`, true for hidden matrices (two or more dimensions, and
    neither `embed` nor `lm_head` in the name), and `param.muon_num_heads`: with `per_head_muon` how many heads a
    projection of attention computes, by the model's config; else None. No effect for other optimizers.

    DeepSpeedConfigError: `per_head_muon`, and no projection of attention is found.
    """
    if (config_class.optimizer_name or "").lower() != "muon":
        return
    per_head = bool((getattr(config_class, "optimizer_params", None) or {}).get("per_head_muon"))
    found = False
    for name, param in model.named_parameters():
        shape = getattr(param, "ds_shape", param.shape)  # under zero.Init the parameter itself is empty
        flags = vars(param)
        matrix = len(shape) - bool(flags.get(STACKED))  # a stack of vectors is none
        flags["use_muon"] = matrix >= 2 and not any(part in name.lower() for part in _NOT_MATRICES)
        flags["muon_num_heads"] = _heads(name, shape, model) if per_head and flags["use_muon"] else None
        found = found or flags["muon_num_heads"] is not None
    if per_head and not found:
        raise DeepSpeedConfigError(
            "optimizer.params.per_head_muon: no projection of attention was found by its name "
            f"({', '.join((*_OF_QUERIES, *_OF_KEYS, *_OF_BOTH))}) whose outputs are the heads that "
            f"{type(model).__name__}.config tells; leave it out, or name the layers like that"
        )


def _heads(name: str, shape: torch.Size, model: torch.nn.Module) -> int | None:
    """Return how many heads the outputs of a matrix form; None: it is no such projection, or its shape says something
    else.
    """
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
    return heads if fits else None


def _widths(layer: str, config: Any, queries: int) -> list[int]:
    """The outputs that a head of the layer may have, by the config; none, if it tells nothing of them.

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
    """The first of these attributes that is a positive number."""
    return next((n for name in names if isinstance(n := getattr(config, name, None), int) and n > 0), None)


def set_state_dtype(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
    """Have one of our optimizers keep its state in the dtype of the master weights, if the plan sets a low one."""
    if dtype in (None, torch.float32):
        return
    optimizer.defaults["fp32_optimizer_states"] = False
    for group in optimizer.param_groups:
        group["fp32_optimizer_states"] = False
