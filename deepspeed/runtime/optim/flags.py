"""Flags on parameters and groups that an optimizer chosen by name reads."""

from __future__ import annotations

from typing import Any

import torch

_NOT_MATRICES = ("embed", "lm_head")


def set_optimizer_flags(config_class: Any, model: torch.nn.Module) -> None:
    """For `optimizer.type` "muon": set `param.use_muon`, true for hidden matrices (two or more dimensions, and
    neither `embed` nor `lm_head` in the name). No effect for other optimizers."""
    if (config_class.optimizer_name or "").lower() != "muon":
        return
    for name, param in model.named_parameters():
        shape = getattr(param, "ds_shape", param.shape)  # under zero.Init the parameter itself is empty
        param.use_muon = len(shape) >= 2 and not any(part in name.lower() for part in _NOT_MATRICES)  # type: ignore[attr-defined]


def set_state_dtype(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
    """Have one of our optimizers keep its state in the dtype of the master weights, if the plan sets a low one."""
    if dtype in (None, torch.float32):
        return
    optimizer.defaults["fp32_optimizer_states"] = False
    for group in optimizer.param_groups:
        group["fp32_optimizer_states"] = False
