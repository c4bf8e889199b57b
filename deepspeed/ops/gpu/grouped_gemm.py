"""Grouped GEMM: groups of rows times one matrix per group, forward and both gradients.

One launch computes all groups. The ends of groups are read on the device, so the host does not wait for them: a program
finds its group and tile by counting the tiles of the preceding groups. The launch has programs for the maximum number
of tiles; those without a tile exit immediately.
"""

# Kernels are Triton, not Python: the types of their arguments mean nothing to a type checker.
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
def _tile_of(tile, ends, groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return the group of a tile, its first row, and the end of the group; ``groups`` or more for a tile that does not
    exist."""
    each = tl.arange(0, GROUPS)
    end = tl.load(ends + each, mask=each < groups, other=0)
    start = tl.load(ends + each - 1, mask=(each > 0) & (each < groups), other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    upto = tl.cumsum(tiles, 0)
    group = tl.sum((upto <= tile).to(tl.int32), 0)
    chosen = each == group
    row = tl.sum(tl.where(chosen, start + (tile - upto + tiles) * ROWS, 0), 0)
    return group, row, tl.sum(tl.where(chosen, end, 0), 0)


@triton.jit
def _product_kernel(
    x,  # [rows, inner]
    matrices,  # [groups, inner, outer], any strides
    bias,  # [groups, outer], or None
    out,  # [rows, outer]
    ends,  # [groups] int32
    groups,
    inner,
    outer,
    group_stride,
    inner_stride,
    outer_stride,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
):
    group, first_row, end = _tile_of(tl.program_id(0), ends, groups, ROWS, GROUPS)
    if group >= groups:
        return
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * OUTER + tl.arange(0, OUTER)).to(tl.int64)[None, :]
    matrix = matrices + group.to(tl.int64) * group_stride
    total = tl.zeros((ROWS, OUTER), tl.float32)
    for first in range(0, inner, INNER):
        middle = (first + tl.arange(0, INNER)).to(tl.int64)
        left = tl.load(
            x + row * inner + middle[None, :], mask=(row < end) & (middle[None, :] < inner), other=0.0
        )
        right = tl.load(
            matrix + middle[:, None] * inner_stride + column * outer_stride,
            mask=(middle[:, None] < inner) & (column < outer),
            other=0.0,
        )
        total = tl.dot(left.to(OPERAND), right.to(OPERAND), total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + group.to(tl.int64) * outer + column, mask=column < outer, other=0.0).to(
            tl.float32
        )
    tl.store(out + row * outer + column, total.to(out.dtype.element_ty), mask=(row < end) & (column < outer))


@triton.jit
def _matrices_kernel(
    x,  # [rows, inner]
    grad,  # [rows, outer]
    out,  # [groups, inner, outer], any strides
    grad_bias,  # [groups, outer], or None
    ends,  # [groups] int32
    inner,
    outer,
    group_stride,
    inner_stride,
    outer_stride,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    middle = (tl.program_id(1) * INNER + tl.arange(0, INNER)).to(tl.int64)
    column = (tl.program_id(2) * OUTER + tl.arange(0, OUTER)).to(tl.int64)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
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
        if grad_bias is not None:
            sums += tl.sum(right.to(tl.float32), 0)
    place = out + group * group_stride + middle[:, None] * inner_stride + column[None, :] * outer_stride
    inside = (middle[:, None] < inner) & (column[None, :] < outer)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)
    if grad_bias is not None and tl.program_id(1) == 0:
        tl.store(grad_bias + group * outer + column, sums.to(grad_bias.dtype.element_ty), mask=column < outer)


def supports(*tensors: Tensor | None) -> bool:
    """Return whether there is a kernel for the common dtype of these tensors."""
    kinds = {tensor.dtype for tensor in tensors if tensor is not None}
    return len(kinds) == 1 and kinds <= FLOATS.keys()


def product(
    rows: Tensor, matrices: Tensor, ends: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply ``rows`` [n, inner] by the matrix of their group in ``matrices`` [groups, inner, outer] (any strides),
    and add that of ``bias`` [groups, outer]. Returns [n, outer]. ``ends``: int32 [groups], the end of each group; rows
    after the last end are not written."""
    count, inner = rows.shape
    groups, _, outer = matrices.shape
    out = rows.new_empty(count, outer) if out is None else out
    if not out.numel() or not groups:
        return out
    tile = _tile(rows, count // groups)
    grid = (triton.cdiv(count, tile["ROWS"]) + groups, triton.cdiv(outer, tile["OUTER"]))
    with torch.cuda.device_of(rows):
        _product_kernel[grid](
            rows.contiguous(),
            matrices,
            None if bias is None else bias.contiguous(),
            out,
            ends,
            groups,
            inner,
            outer,
            *matrices.stride(),
            **_types(rows),
            **tile,
            GROUPS=triton.next_power_of_2(groups),
        )
    return out


def matrices_gradient(
    rows: Tensor, grad: Tensor, matrices: Tensor, ends: Tensor, grad_bias: Tensor | None
) -> Tensor:
    """Return the gradient of ``matrices``, in their layout, given ``grad`` [n, outer] of `product`, and write that of
    the bias to ``grad_bias`` [groups, outer]. Both are zero for a group without rows."""
    groups, inner, outer = matrices.shape
    out = torch.empty_like(matrices)
    if not out.numel():
        return out
    tile = {"ROWS": 32, "INNER": 64, "OUTER": 64 if rows.dtype is torch.float32 else 128}
    grid = (groups, triton.cdiv(inner, tile["INNER"]), triton.cdiv(outer, tile["OUTER"]))
    with torch.cuda.device_of(rows):
        _matrices_kernel[grid](
            rows.contiguous(),
            grad.contiguous(),
            out,
            grad_bias,
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
    """`product` with gradients for rows, matrices and bias; rows after the last end give zeros."""

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
        grad_rows = rows.new_zeros(rows.shape) if to_rows else None
        grad_bias = grad.new_zeros(len(matrices), matrices.shape[2]) if to_bias else None
        made = None
        if grad_rows is not None:
            product(grad, matrices.transpose(1, 2), ends, out=grad_rows)
        if to_matrices or to_bias:
            made = matrices_gradient(rows, grad, matrices, ends, grad_bias)
        return grad_rows, made if to_matrices else None, None, grad_bias


def _types(rows: Tensor) -> dict[str, Any]:
    return {"OPERAND": operand_type(rows.dtype), "PRECISION": product_precision()}


def _tile(rows: Tensor, each: int) -> dict[str, Any]:
    """Choose the tile of `product` for groups with ``each`` rows on average. Large tiles reload operands less often,
    but only large groups fill them."""
    if rows.dtype is torch.float32:
        return {"ROWS": 64, "INNER": 32, "OUTER": 64, "num_warps": 4, "num_stages": 3}
    if each <= 16:
        return {"ROWS": 16, "INNER": 64, "OUTER": 64, "num_warps": 4, "num_stages": 4}
    if each <= 128:
        return {"ROWS": 64, "INNER": 64, "OUTER": 128, "num_warps": 4, "num_stages": 3}
    return {"ROWS": 128, "INNER": 64, "OUTER": 128, "num_warps": 8, "num_stages": 3}
