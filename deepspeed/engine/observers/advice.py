"""Advice in the log after an error: how to lower peak memory after an out-of-memory error, and which config key casts
the buffers of a 16-bit model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepspeed.base.dtypes import Dtype
from deepspeed.base.logging import logger

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine

OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
"""Substrings of messages of allocators that raise a plain RuntimeError: torch's for the host, and drivers'."""
OTHER_DTYPE = ("same dtype", "expected scalar type", "should be the same", "same data type")
"""Substrings of torch's messages about operands of different dtypes."""
SHOWN = 3


def advise(engine: Engine, given: set[str], error: BaseException | None) -> None:
    """Log advice after ``error``, on the failing rank. ``given``: kinds of advice already given, which are not
    repeated."""
    for kind, text in (("memory", _memory_advice), ("buffers", _buffer_advice)):
        if kind not in given and (advice := text(engine, error)) is not None:
            given.add(kind)
            logger.error(advice)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` is a failed allocation, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in OUT_OF_MEMORY)


def _memory_advice(engine: Engine, error: BaseException | None) -> str | None:
    """Return the planned memory, and the cheapest change that lowers its peak; None for other errors."""
    if not is_out_of_memory(error):
        return None
    # The planner is imported on demand.
    from deepspeed.engine.observers.planned_memory import remedy

    try:
        return remedy(engine)
    except Exception as problem:  # advice must not hide the error
        logger.debug(f"no remedy could be planned: {problem}")
        return None


def _buffer_advice(engine: Engine, error: BaseException | None) -> str | None:
    """Return the config key that casts buffers, if the error is a dtype mismatch and buffers were not cast."""
    if not isinstance(error, RuntimeError) or not any(sign in str(error) for sign in OTHER_DTYPE):
        return None
    precision = engine.plan.precision
    if precision.param is None or precision.param.itemsize >= 4 or precision.buffer is not None:
        return None
    names = list(wide_buffers(engine.module))
    if not names:
        return None
    name = Dtype(precision.param)
    more = ", ..." if len(names) > SHOWN else ""
    return (
        f"the weights of this model are in {name}, but buffers keep their dtype, as in release 0.19: "
        f"{', '.join(names[:SHOWN])}{more}. If the operation that failed uses one of them, set "
        f'"data_types": {{"buffer_dtype": "{name}"}} in the config, as earlier releases cast them, or cast the '
        "buffer where the model uses it."
    )


def wide_buffers(module: nn.Module) -> Iterator[str]:
    """Yield the names of floating buffers of more than 16 bits, except the running statistics of norms."""
    for name, buffer in module.named_buffers():
        if not buffer.is_floating_point() or buffer.itemsize < 4:
            continue
        if not name.endswith(("running_mean", "running_var")):
            yield name
