"""Documented helpers of ``torch_autocast``: parameters whose gradients are summed in low precision, and the context.

The engine decides by its plan (``zero/precision.py``); these helpers read its decision, or mark other modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.base.accelerator import get_accelerator
from deepspeed.config.plan import AUTOCAST_MODULES
from deepspeed.zero.precision import PARAM_COMM_DTYPE_ATTR_NAME as PARAM_COMM_DTYPE_ATTR_NAME
from deepspeed.zero.precision import autocast_context, safe_parameters


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Return the classes whose gradients are summed in autocast's dtype, if ``lower_precision_safe_modules`` is
    unset."""
    return list(AUTOCAST_MODULES)


def init_autocast_params(
    engine: Any, dtype: torch.dtype, torch_autocast_lower_precision_safe_modules: Iterable[str] | None
) -> None:
    """Mark the parameters of these classes (default: AUTOCAST_MODULES) in an engine or a module. An engine's own sums
    follow ``torch_autocast.lower_precision_safe_modules`` of the config, by which it has already marked them."""
    module = engine if isinstance(engine, nn.Module) else engine.module
    names = torch_autocast_lower_precision_safe_modules
    for param in safe_parameters(module, AUTOCAST_MODULES if names is None else names):
        setattr(param, PARAM_COMM_DTYPE_ATTR_NAME, dtype)


def get_autocast_dtype() -> torch.dtype:
    """Return the dtype of `torch.autocast` on this process's accelerator."""
    return torch.get_autocast_dtype(get_accelerator().device_name())


def has_comm_dtype(param: nn.Parameter) -> bool:
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """Return the dtype in which a parameter's gradient is summed: its own, unless marked."""
    return getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)


def autocast_if_enabled(engine: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context of the engine's forward; a null context without ``torch_autocast``."""
    return autocast_context(engine.plan.precision, engine.device.type)
