"""Documented helpers of ``torch_autocast``: which parameters are summed in a lower precision, and the context itself.

The engine decides from its plan (``zero/precision.py``); here its decision can be read, or made for others.
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
    """The classes whose parameters are summed in autocast's dtype, without ``lower_precision_safe_modules``."""
    return list(AUTOCAST_MODULES)


def init_autocast_params(
    engine: Any, dtype: torch.dtype, torch_autocast_lower_precision_safe_modules: Iterable[str] | None
) -> None:
    """Mark the parameters of these classes (default: the usual ones) in an engine or a module. For an engine's own sums
    ``torch_autocast.lower_precision_safe_modules`` in the config counts, from which it has marked them already."""
    module = engine if isinstance(engine, nn.Module) else engine.module
    names = torch_autocast_lower_precision_safe_modules
    for param in safe_parameters(module, AUTOCAST_MODULES if names is None else names):
        setattr(param, PARAM_COMM_DTYPE_ATTR_NAME, dtype)


def get_autocast_dtype() -> torch.dtype:
    """In which `torch.autocast` computes on this process's device."""
    return torch.get_autocast_dtype(get_accelerator().device_name())


def has_comm_dtype(param: nn.Parameter) -> bool:
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """The dtype in which a parameter's gradient is summed: its own, unless marked."""
    return getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)


def autocast_if_enabled(engine: Any) -> contextlib.AbstractContextManager[Any]:
    """The autocast that the engine's forward runs in; a context that does nothing without ``torch_autocast``."""
    return autocast_context(engine.plan.precision, engine.device.type)
