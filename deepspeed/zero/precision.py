"""Apply a ``PrecisionPlan``: cast the module and its inputs, autocast, and the table of dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.sharded import is_zero_param
from deepspeed.config.plan import PrecisionPlan
from deepspeed.zero.params import is_castable, sync_shard_dtype

PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"
"""Parameter attribute: the wire dtype of its gradient, if not the parameter's dtype."""
FULL_PRECISION = "ds_in_full"
"""Module attribute: True if it computes in fp32 even under autocast."""


def cast_module(module: nn.Module, plan: PrecisionPlan) -> None:
    """Cast floating parameters to ``param_dtype`` and buffers to ``plan.buffer``, in place; None leaves them as is.
    Quantized weights (frozen, 8 bits or less) and buffers of such dtypes are left alone. By default buffers keep
    their dtype: rotary frequencies and running statistics lose too much precision in 16 bits.

    [Note: batch norm] Weights and running statistics of a batch norm must have the same dtype; torch accepts fp32
    with 16-bit inputs, and returns 16 bits. So in a 16-bit model such a module stays entirely in fp32, weights
    included, or has the dtype of ``plan.buffer`` throughout. A batch norm without weights ("frozen") multiplies its
    inputs by its statistics, whose dtype its outputs get: so the statistics are cast to the model's dtype.
    """
    param_to = param_dtype(module, plan)
    norms = [owner for owner in module.modules() if _has_statistics(owner)] if _is_low(plan.param) else []
    for param, dtype in wire_dtypes(module, plan).items():
        setattr(param, PARAM_COMM_DTYPE_ATTR_NAME, dtype)
    own = {norm: plan.buffer or (torch.float32 if norm._parameters else plan.param) for norm in norms}
    with torch.no_grad():
        for owner in module.modules():
            for param in owner.parameters(recurse=False):
                _cast_param(param, own.get(owner, param_to))
            for name, buffer in owner._buffers.items():
                dtype = own.get(owner, plan.buffer)
                if buffer is not None and dtype is not None and is_castable(buffer):
                    owner._buffers[name] = buffer.to(dtype)


def param_dtype(module: nn.Module, plan: PrecisionPlan) -> torch.dtype | None:
    """Return the dtype to which the parameters are cast; None: each keeps its own (``plan.keeps_mixed``)."""
    mixed = plan.keeps_mixed and any(p.dtype == plan.param for p in module.parameters() if is_castable(p))
    return None if mixed else plan.param


def _is_low(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize < 4


def _has_statistics(module: nn.Module) -> bool:
    """Return whether the module normalizes by running statistics: BatchNorm, SyncBatchNorm, InstanceNorm with
    statistics, and similar classes of other packages."""
    # a scripted module's table of buffers has no get()
    return all(getattr(module, name, None) is not None for name in ("running_mean", "running_var"))


def _cast_param(param: nn.Parameter, dtype: torch.dtype | None) -> None:
    if dtype is None or not is_castable(param):
        return
    if param.dtype != dtype:
        param.data = param.data.to(dtype)
    if is_zero_param(param):
        sync_shard_dtype(param)


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating tensors inside ``value`` to ``dtype``; lists, tuples and dicts are rebuilt, other containers left
    alone."""
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
    """Return the non-default wire dtypes: those of parameters in autocast's lower-precision-safe modules."""
    if plan.autocast is None or not plan.autocast_modules or plan.reduce is not None:
        return {}
    return dict.fromkeys(safe_parameters(module, plan.autocast_modules), plan.autocast)


def safe_parameters(module: nn.Module, classes: Iterable[str]) -> Iterator[nn.Parameter]:
    """Yield the parameters of modules of these classes, given by qualified name, except of modules marked
    ``FULL_PRECISION``, whose gradients have more than 16 bits."""
    safe = set(classes)
    for owner in module.modules():
        if getattr(owner, FULL_PRECISION, False):
            continue
        kinds = type(owner).__mro__
        names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
        names |= {f"torch.nn.{kind.__name__}" for kind in kinds if getattr(nn, kind.__name__, None) is kind}
        if names & safe:
            yield from owner.parameters(recurse=False)


def precision_table(rows: Sequence[tuple[str, set[torch.dtype]]]) -> str:
    """Return the kinds of tensors with their dtypes as an aligned text block."""
    width = max(len(kind) for kind, _ in rows)
    lines = [
        f"  {kind:<{width}}  {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes)) or '-'}"
        for kind, dtypes in rows
    ]
    return "\n".join(lines)
