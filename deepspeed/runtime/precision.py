"""Applying a ``PrecisionPlan``: casting the module and its inputs, autocast, and the table of dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.runtime.plan import PrecisionPlan
from deepspeed.runtime.zero.params import is_zero_param


def cast_module(module: nn.Module, plan: PrecisionPlan) -> None:
    """Cast floating parameters to ``plan.param`` and buffers to ``plan.buffer``, in place; None leaves them.

    By default buffers stay as they are: rotary frequencies and running statistics lose too much in 16 bits.
    """
    with torch.no_grad():
        if plan.param is not None:
            for param in module.parameters():
                if param.is_floating_point() and param.dtype != plan.param:
                    param.data = param.data.to(plan.param)
                    if is_zero_param(param):  # made under zero.Init in another dtype
                        param.ds_home.cast(param, plan.param)  # type: ignore[attr-defined]
        if plan.buffer is not None:
            for owner in module.modules():
                for name, buffer in owner._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        owner._buffers[name] = buffer.to(plan.buffer)


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of ``value`` in ``dtype``; containers are rebuilt only as far as needed."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_inputs(v, dtype) for v in value))
    if type(value) in (list, tuple):
        return type(value)(cast_inputs(v, dtype) for v in value)
    if type(value) is dict:
        return {k: cast_inputs(v, dtype) for k, v in value.items()}
    return value


def autocast_context(plan: PrecisionPlan, device_type: str) -> contextlib.AbstractContextManager[Any]:
    if plan.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=plan.autocast)


def wire_dtypes(module: nn.Module, plan: PrecisionPlan) -> dict[nn.Parameter, torch.dtype]:
    """Wire dtype of parameters that differ from the default: those of autocast's lower-precision-safe modules."""
    if plan.autocast is None or not plan.autocast_modules or plan.reduce is not None:
        return {}
    safe = set(plan.autocast_modules)
    result: dict[nn.Parameter, torch.dtype] = {}
    for owner in module.modules():
        kinds = type(owner).__mro__
        names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
        names |= {f"torch.nn.{kind.__name__}" for kind in kinds if getattr(nn, kind.__name__, None) is kind}
        if names & safe:
            for param in owner.parameters(recurse=False):
                result[param] = plan.autocast
    return result


def precision_table(rows: Sequence[tuple[str, set[torch.dtype]]]) -> str:
    """Kinds of tensors and their dtypes, as one aligned text block."""
    width = max(len(kind) for kind, _ in rows)
    lines = [
        f"  {kind:<{width}}  {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes)) or '-'}"
        for kind, dtypes in rows
    ]
    return "\n".join(lines)
