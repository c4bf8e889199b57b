"""Whole rows taken from a matrix, put into one, and added to one, at given places that are all different."""

# A kernel is Triton, not Python: the types of its arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.gpu.types import FLOATS


@triton.jit
def _rows_kernel(
    source,
    target,
    places,
    size,
    GATHER: tl.constexpr,  # target[i] = source[places[i]], else target[places[i]] = source[i]
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.load(places + tl.program_id(0)).to(tl.int64)
    here = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    origin, goal = (place, here) if GATHER else (here, place)
    value = tl.load(source + origin * size + column, mask=inside, other=0.0)
    if ADD:
        old = tl.load(target + goal * size + column, mask=inside, other=0.0)
        value = value.to(tl.float32) + old.to(tl.float32)
    else:
        value = value.to(tl.float32)
    tl.store(target + goal * size + column, value.to(target.dtype.element_ty), mask=inside)


def takes(*tensors: Tensor) -> bool:
    """Whether there is a kernel for rows of such types."""
    return all(tensor.dtype in FLOATS and tensor.dim() >= 2 for tensor in tensors)


def gathered(source: Tensor, places: Tensor) -> Tensor:
    """``source`` [rows, ...] at ``places`` [n]: [n, ...]."""
    out = source.new_empty(len(places), *source.shape[1:])
    _move(source.contiguous(), out, places, gather=True)
    return out


def put(target: Tensor, places: Tensor, source: Tensor, *, add: bool = False) -> Tensor:
    """A copy of ``target`` [rows, ...] with ``source`` [n, ...] at ``places`` [n], or added there."""
    out = target.clone(memory_format=torch.contiguous_format)
    _move(source.contiguous(), out, places, gather=False, add=add)
    return out


def _move(source: Tensor, target: Tensor, places: Tensor, *, gather: bool, add: bool = False) -> None:
    size = target.shape[1:].numel()
    if not size or not len(places):
        return
    block = min(1024, triton.next_power_of_2(size))
    with torch.cuda.device_of(source):
        _rows_kernel[(len(places), triton.cdiv(size, block))](
            source, target, places.contiguous(), size, GATHER=gather, ADD=add, BLOCK=block, num_warps=4
        )
