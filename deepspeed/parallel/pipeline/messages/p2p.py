"""The documented functions that send tensors from one stage to a neighbour, for loops of one's own.

The engine does not use them: its channels (``channel.py``) also tell the other side what comes.
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
    """The grid that was registered last, and what is on its way."""

    grid: PipelineParallelGrid | None = None
    pending: list[tuple[Any, Tensor]] = field(default_factory=list)


_state = _P2PState()


def init_process_groups(grid: PipelineParallelGrid) -> None:
    """Let stages be those of ``grid`` from now on. ValueError: it has a single one."""
    if grid.pipe_parallel_size < 2:
        raise ValueError(
            "init_process_groups() needs a grid of at least 2 stages: a single one has no neighbour"
        )
    _state.grid = grid
    _state.pending.clear()


def send(tensor: Tensor, dest_stage: int, async_op: bool = False) -> Any:
    """Send ``tensor`` (contiguous) to a neighbouring stage of the same pipeline, where ``recv`` gets it.

    The first and the last stage are neighbours too. ``async_op``: returns at once, and ``wait()`` ends it; the tensor
    must not change until then. PipelineError: the stage is no neighbour, or no grid was registered.
    """
    grid, rank = _neighbour(dest_stage)
    if not tensor.is_contiguous():
        raise PipelineError("send() takes a contiguous tensor: call tensor.contiguous()")
    if not async_op:
        return dist.send(tensor, rank, group=grid.get_pipe_parallel_group())
    return _start(dist.isend(tensor, rank, group=grid.get_pipe_parallel_group()), tensor)


def recv(tensor: Tensor, src_stage: int, async_op: bool = False) -> Any:
    """Receive into ``tensor``, of the same shape and dtype as what a neighbouring stage sends. As ``send``."""
    grid, rank = _neighbour(src_stage)
    if not tensor.is_contiguous():
        raise PipelineError("recv() takes a contiguous tensor: make it with torch.empty()")
    if not async_op:
        return dist.recv(tensor, rank, group=grid.get_pipe_parallel_group())
    return _start(dist.irecv(tensor, rank, group=grid.get_pipe_parallel_group()), tensor)


def wait() -> None:
    """End what was started with ``async_op``, in that order."""
    while _state.pending:
        _state.pending.pop(0)[0].wait()
    get_accelerator().synchronize()


def _neighbour(stage: int) -> tuple[PipelineParallelGrid, int]:
    grid = _state.grid
    if grid is None:
        raise PipelineError("no stages are known: call init_process_groups(grid) first")
    own, last = grid.get_stage_id(), grid.pipe_parallel_size - 1
    if not 0 <= stage <= last or (abs(stage - own) != 1 and {stage, own} != {0, last}):
        raise PipelineError(f"stage {stage} is no neighbour of stage {own} of {last + 1}")
    return grid, grid.stage_to_global(stage)


def _start(work: Any, tensor: Tensor) -> Any:
    _state.pending.append((work, tensor))
    return work
