"""Shared by the Triton attention kernels: steps of an online softmax, without materialized scores, and tile sizes.

Scores are in units of log 2 here (``exp2`` is what a GPU computes), and in fp32. M. Milakov, N. Gimelshein: Online
normalizer calculation for softmax, 2018; T. Dao: FlashAttention-2, 2023.
"""

# Kernels are Triton, not Python: the types of their arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from deepspeed.ops.gpu.types import FLOATS

LOG2E = 1.4426950408889634
"""Factor of the scores and of terms added to them."""
_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def biased(scores, bias, place, mask):
    """Return the scores plus ``bias`` at ``place``, if there is one. Both broadcast to the scores."""
    if bias is not None:
        scores += tl.load(bias + place, mask=mask, other=0.0).to(tl.float32) * _LOG2E
    return scores


@triton.jit
def joined(top, total, out, scores, value, DOT: tl.constexpr):
    """Update the largest score, sum of weights and weighted values of each row by further columns. They start as -inf,
    0 and zeros."""
    found = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(found == float("-inf"), 0.0, found)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    out = out * shrink[:, None] + tl.dot(weights.to(DOT), value, input_precision="ieee")
    return found, total, out


@triton.jit
def finished(top, total, out):
    """Return the attention of each row and its log-sum-exp, from sums over all columns."""
    some = total > 0.0
    return out / tl.where(some, total, 1.0)[:, None], tl.where(some, top + tl.log2(total), float("-inf"))


@triton.jit
def finite(lse):
    """Replace -inf by 0 in ``lse``: a fully masked row then has zero weights, whatever is subtracted from its
    scores."""
    return tl.where(lse == float("-inf"), 0.0, lse)


@triton.jit
def scores_gradient(weights, left, right, delta):
    """Return the gradient of the scores between rows of ``left`` and rows of ``right``: those of the gradient of the
    output and values, whichever way the weights lie. ``delta``, the product of output and its gradient of each row,
    broadcasts to them."""
    return weights * (tl.dot(left, tl.trans(right), input_precision="ieee") - delta)


def where_tensors_are(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function on the GPU of the first tensor among its arguments: Triton launches on the current GPU."""

    @wraps(function)
    def on_its_device(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(args[0]):
            return function(*args, **kwargs)

    return on_its_device


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


class Tile(NamedTuple):
    """Rows and columns computed by a program at a time."""

    rows: int
    columns: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n`` and 16, the minimum for a matrix product."""
    return max(16, 1 << max(0, n - 1).bit_length())


def forward_tile(q: torch.Tensor, rows: int = 64) -> Tile:
    """Choose a tile of up to ``rows`` rows, a power of two, by the compiler's register and shared-memory counts; not
    timed yet."""
    size = power_of_two(q.shape[-1])
    if q.dtype is torch.float32:
        return Tile(min(rows, 32), 32, 4, 1) if size <= 64 else Tile(min(rows, 32), 16, 8, 1)
    if size > 128:
        return Tile(min(rows, 64), 32, 4, 2)
    if rows >= 128:
        return Tile(128, 64, 8, 2)
    return Tile(rows, 64, 4 if rows > 16 else 2, 2)


def backward_tile(q: torch.Tensor, rows: int = 64) -> Tile:
    size = power_of_two(q.shape[-1])
    if q.dtype is torch.float32:
        return Tile(min(rows, 32), 32, 4 if size <= 32 else 8, 1) if size <= 64 else Tile(16, 16, 8, 1)
    if size > 128:
        return Tile(min(rows, 32), 32, 4, 1)
    return Tile(min(rows, 64), 64 if size <= 64 else 32, 4, 2)


def supports(dtype: torch.dtype, *sizes: int) -> bool:
    """Return whether attention kernels support tensors of this dtype with these head sizes."""
    return dtype in FLOATS and all(0 < size <= 256 for size in sizes)
