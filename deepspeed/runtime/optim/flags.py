"""Flags on parameters and groups that an optimizer chosen by name reads."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.config.problems import DeepSpeedConfigError

_NOT_MATRICES = ("embed", "lm_head")

# Layers of attention whose outputs are heads one after the other, by the last part of their names.
_OF_QUERIES = ("q_proj", "query", "wq", "q_b_proj", "kv_b_proj")
_OF_KEYS = ("k_proj", "key", "wk", "v_proj", "value", "wv")
_QUERY_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", *_QUERY_HEADS)


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
        flags["use_muon"] = len(shape) >= 2 and not any(part in name.lower() for part in _NOT_MATRICES)
        flags["muon_num_heads"] = _heads(name, shape, model) if per_head and flags["use_muon"] else None
        found = found or flags["muon_num_heads"] is not None
    if per_head and not found:
        raise DeepSpeedConfigError(
            "optimizer.params.per_head_muon: no projection of attention was found by its name "
            f"({', '.join((*_OF_QUERIES, *_OF_KEYS))}) whose outputs are the heads that {type(model).__name__}.config "
            "tells; leave it out, or name the layers like that"
        )


def _heads(name: str, shape: torch.Size, model: torch.nn.Module) -> int | None:
    """How many heads the outputs of a matrix are; None: it is no such projection, or its shape says something else."""
    layer = name.removesuffix(".weight").rpartition(".")[2]
    names = _QUERY_HEADS if layer in _OF_QUERIES else _KEY_HEADS if layer in _OF_KEYS else ()
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    heads = next((n for each in names if isinstance(n := getattr(config, each, None), int) and n > 0), None)
    if heads is None or len(shape) != 2 or shape[0] % heads:
        return None
    width = getattr(config, "head_dim", None)
    if layer.endswith("_b_proj") or not isinstance(width, int):
        return heads
    return heads if shape[0] == heads * width else None


def set_state_dtype(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
    """Have one of our optimizers keep its state in the dtype of the master weights, if the plan sets a low one."""
    if dtype in (None, torch.float32):
        return
    optimizer.defaults["fp32_optimizer_states"] = False
    for group in optimizer.param_groups:
        group["fp32_optimizer_states"] = False
