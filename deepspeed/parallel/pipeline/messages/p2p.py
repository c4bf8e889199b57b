"""The documented functions that send tensors between neighbouring stages, for custom training loops.

The engine does not use them: its channels (``channels.py``) also transmit shapes and dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm.topology import PipelineParallelGrid
from deepspeed.parallel.pipeline.errors import PipelineError


@dataclass(slots=True)
class _P2PState:
    """The registered grid, and the operations in flight."""

    grid: PipelineParallelGrid | None = None
    pending: list[tuple[Any, Tensor]] = field(default_factory=list)


_state = _P2PState()


def init_process_groups(grid: PipelineParallelGrid) -> None:
    """Register ``grid``, whose stages later calls refer to. ValueError: it has a single stage."""
    if grid.pipe_parallel_size < 2:
        raise ValueError("init_process_groups() needs a grid of at least 2 stages")
    _state.grid = grid
    _state.pending.clear()


def send(tensor: Tensor, dest_stage: int, async_op: bool = False) -> Any:
    """Send ``tensor`` (contiguous) to a neighbouring stage of the same pipeline, which calls ``recv``.

    The first and the last stage are neighbours too. ``async_op``: return at once; the tensor must not change until
    ``wait()``. PipelineError: the stage is no neighbour, or no grid was registered.
    """
    grid, rank = _neighbour(dest_stage)
    if not tensor.is_contiguous():
        raise PipelineError("send() needs a contiguous tensor: call tensor.contiguous()")
    if not async_op:
        return dist.send(tensor, rank, group=grid.get_pipe_parallel_group())
    return _start(dist.isend(tensor, rank, group=grid.get_pipe_parallel_group()), tensor)


def recv(tensor: Tensor, src_stage: int, async_op: bool = False) -> Any:
    """Receive into ``tensor``, of the shape and dtype that a neighbouring stage sends. Otherwise like ``send``."""
    grid, rank = _neighbour(src_stage)
    if not tensor.is_contiguous():
        raise PipelineError("recv() needs a contiguous tensor: allocate it with torch.empty()")
    if not async_op:
        return dist.recv(tensor, rank, group=grid.get_pipe_parallel_group())
    return _start(dist.irecv(tensor, rank, group=grid.get_pipe_parallel_group()), tensor)


def wait() -> None:
    """Wait for all operations started with ``async_op``, in order."""
    while _state.pending:
        _state.pending.pop(0)[0].wait()
    get_accelerator().synchronize()


def _neighbour(stage: int) -> tuple[PipelineParallelGrid, int]:
    grid = _state.grid
    if grid is None:
        raise PipelineError("no stages are known: call init_process_groups(grid) first")
    own, last = grid.get_stage_id(), grid.pipe_parallel_size - 1
    if not 0 <= stage <= last or (abs(stage - own) != 1 and {stage, own} != {0, last}):
        raise PipelineError(f"stage {stage} is not a neighbour of stage {own} ({last + 1} stages)")
    return grid, grid.stage_to_global(stage)


def _start(work: Any, tensor: Tensor) -> Any:
    _state.pending.append((work, tensor))
    return work
