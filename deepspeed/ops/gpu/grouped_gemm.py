"""Grouped GEMM, groups of rows times one matrix per group: forward, and both gradients.

A kernel is launched once for all runs. Where they end is read on the device, so nothing waits for it to be known on the
host: a program finds its run and its tile in it by counting the tiles of the runs before. The launch has programs for
the most tiles that there can be; those that have none end at once.
"""

# A kernel is Triton, not Python: the types of its arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops.gpu.types import FLOATS, operand_type, product_precision


@triton.jit
def _place_of(tile, ends, runs, ROWS: tl.constexpr, RUNS: tl.constexpr):
    """The run of a tile, the first of its rows, and where the run ends. A tile too many gets run ``runs`` or more."""
    each = tl.arange(0, RUNS)
    end = tl.load(ends + each, mask=each < runs, other=0)
    start = tl.load(ends + each - 1, mask=(each > 0) & (each < runs), other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    upto = tl.cumsum(tiles, 0)
    run = tl.sum((upto <= tile).to(tl.int32), 0)
    chosen = each == run
    row = tl.sum(tl.where(chosen, start + (tile - upto + tiles) * ROWS, 0), 0)
    return run, row, tl.sum(tl.where(chosen, end, 0), 0)


@triton.jit
def _product_kernel(
    x,  # [rows, inner]
    matrices,  # [runs, inner, outer], in any layout
    bias,  # [runs, outer], or None
    out,  # [rows, outer]
    ends,  # [runs] int32
    runs,
    inner,
    outer,
    of_run,
    of_inner,
    of_outer,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
):
    run, first_row, end = _place_of(tl.program_id(0), ends, runs, ROWS, RUNS)
    if run >= runs:
        return
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * OUTER + tl.arange(0, OUTER)).to(tl.int64)[None, :]
    matrix = matrices + run.to(tl.int64) * of_run
    total = tl.zeros((ROWS, OUTER), tl.float32)
    for first in range(0, inner, INNER):
        middle = (first + tl.arange(0, INNER)).to(tl.int64)
        left = tl.load(
            x + row * inner + middle[None, :], mask=(row < end) & (middle[None, :] < inner), other=0.0
        )
        right = tl.load(
            matrix + middle[:, None] * of_inner + column * of_outer,
            mask=(middle[:, None] < inner) & (column < outer),
            other=0.0,
        )
        total = tl.dot(left.to(OPERAND), right.to(OPERAND), total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + run.to(tl.int64) * outer + column, mask=column < outer, other=0.0).to(
            tl.float32
        )
    tl.store(out + row * outer + column, total.to(out.dtype.element_ty), mask=(row < end) & (column < outer))


@triton.jit
def _matrices_kernel(
    x,  # [rows, inner]
    grad,  # [rows, outer]
    out,  # [runs, inner, outer], in any layout
    of_bias,  # [runs, outer], or None
    ends,  # [runs] int32
    inner,
    outer,
    of_run,
    of_inner,
    of_outer,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
):
    run = tl.program_id(0).to(tl.int64)
    middle = (tl.program_id(1) * INNER + tl.arange(0, INNER)).to(tl.int64)
    column = (tl.program_id(2) * OUTER + tl.arange(0, OUTER)).to(tl.int64)
    start = tl.load(ends + run - 1, mask=run > 0, other=0)
    end = tl.load(ends + run)
    total = tl.zeros((INNER, OUTER), tl.float32)
    sums = tl.zeros((OUTER,), tl.float32)
    for first in range(start, end, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        left = tl.load(
            x + row * inner + middle[None, :], mask=(row < end) & (middle[None, :] < inner), other=0.0
        )
        right = tl.load(
            grad + row * outer + column[None, :], mask=(row < end) & (column[None, :] < outer), other=0.0
        )
        total = tl.dot(tl.trans(left.to(OPERAND)), right.to(OPERAND), total, input_precision=PRECISION)
        if of_bias is not None:
            sums += tl.sum(right.to(tl.float32), 0)
    place = out + run * of_run + middle[:, None] * of_inner + column[None, :] * of_outer
    inside = (middle[:, None] < inner) & (column[None, :] < outer)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)
    if of_bias is not None and tl.program_id(1) == 0:
        tl.store(of_bias + run * outer + column, sums.to(of_bias.dtype.element_ty), mask=column < outer)


def takes(*tensors: Tensor | None) -> bool:
    """Return whether there is a kernel for the dtype that all of these have."""
    kinds = {tensor.dtype for tensor in tensors if tensor is not None}
    return len(kinds) == 1 and kinds <= FLOATS.keys()


def product(
    rows: Tensor, matrices: Tensor, ends: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``rows`` [n, inner] times the matrix of their run in ``matrices`` [runs, inner, outer] (in any layout), plus that
    of ``bias`` [runs, outer]: [n, outer]. ``ends``: int32 [runs], where each run ends; rows behind the last end are not
    written."""
    count, inner = rows.shape
    runs, _, outer = matrices.shape
    out = rows.new_empty(count, outer) if out is None else out
    if not out.numel() or not runs:
        return out
    tile = _tile(rows, count // runs)
    grid = (triton.cdiv(count, tile["ROWS"]) + runs, triton.cdiv(outer, tile["OUTER"]))
    with torch.cuda.device_of(rows):
        _product_kernel[grid](
            rows.contiguous(),
            matrices,
            None if bias is None else bias.contiguous(),
            out,
            ends,
            runs,
            inner,
            outer,
            *matrices.stride(),
            **_types(rows),
            **tile,
            RUNS=triton.next_power_of_2(runs),
        )
    return out


def of_matrices(rows: Tensor, grad: Tensor, matrices: Tensor, ends: Tensor, of_bias: Tensor | None) -> Tensor:
    """The gradient of ``matrices``, in their layout, for the gradient ``grad`` [n, outer] of `product`; that of the
    bias is written to ``of_bias`` [runs, outer]. Both are zeros for a run without rows."""
    runs, inner, outer = matrices.shape
    out = torch.empty_like(matrices)
    if not out.numel():
        return out
    tile = {"ROWS": 32, "INNER": 64, "OUTER": 64 if rows.dtype is torch.float32 else 128}
    grid = (runs, triton.cdiv(inner, tile["INNER"]), triton.cdiv(outer, tile["OUTER"]))
    with torch.cuda.device_of(rows):
        _matrices_kernel[grid](
            rows.contiguous(),
            grad.contiguous(),
            out,
            of_bias,
            ends,
            inner,
            outer,
            *out.stride(),
            **_types(rows),
            **tile,
            num_warps=4,
            num_stages=3,
        )
    return out


class GroupedProduct(torch.autograd.Function):
    """`product` with gradients, of rows, matrices and bias; rows behind the last end give zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, matrices, ends)
        out = rows.new_zeros(len(rows), matrices.shape[2])
        return product(rows, matrices, ends, bias, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None]:
        rows, matrices, ends = ctx.saved_tensors
        to_rows, to_matrices, _, to_bias = ctx.needs_input_grad
        of_rows = rows.new_zeros(rows.shape) if to_rows else None
        of_bias = grad.new_zeros(len(matrices), matrices.shape[2]) if to_bias else None
        made = None
        if of_rows is not None:
            product(grad, matrices.transpose(1, 2), ends, out=of_rows)
        if to_matrices or to_bias:
            made = of_matrices(rows, grad, matrices, ends, of_bias)
        return of_rows, made if to_matrices else None, None, of_bias


def _types(rows: Tensor) -> dict[str, Any]:
    return {"OPERAND": operand_type(rows.dtype), "PRECISION": product_precision()}


def _tile(rows: Tensor, each: int) -> dict[str, Any]:
    """Choose the tile of `product` for groups of ``each`` rows on average. Large tiles read factors more rarely, but
    are filled by large groups only."""
    if rows.dtype is torch.float32:
        return {"ROWS": 64, "INNER": 32, "OUTER": 64, "num_warps": 4, "num_stages": 3}
    if each <= 16:
        return {"ROWS": 16, "INNER": 64, "OUTER": 64, "num_warps": 4, "num_stages": 4}
    if each <= 128:
        return {"ROWS": 64, "INNER": 64, "OUTER": 128, "num_warps": 4, "num_stages": 3}
    return {"ROWS": 128, "INNER": 64, "OUTER": 128, "num_warps": 8, "num_stages": 3}
