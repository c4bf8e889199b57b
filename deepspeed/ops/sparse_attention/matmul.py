"""Products in which one of three matrices is block-sparse, with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.sparse_attention.softmax import BlockIndex, sampled, times_dense

_MODES = ("sdd", "dsd", "dds")


@dataclass(eq=False)
class MatMul:
    """``c = a @ b`` over batches and heads. The letters of ``mode`` tell for c, a and b whether they are dense (d) or
    sparse (s).

    Dense operands are [batch, heads, rows, columns] (leading dimensions may be missing), sparse ones the blocks of
    ``layout`` [batch, number of blocks, block, block], in the order of ``layout.nonzero()``. The cost is proportional
    to the number of blocks; the dense form of the sparse matrix is never materialized.

    Args:
        layout: [heads, block rows, block columns] of the sparse matrix as stored (before a transposition).
        block: tokens along one side of a block.
        mode: "sdd", "dsd" or "dds".
        trans_a, trans_b: multiply with the transpose (of the last two dimensions) of an operand.
        bench: accepted for compatibility.

    Raises:
        NotImplementedError: another mode. ValueError (in a call): operands that do not fit the layout.
    """

    layout: Tensor
    block: int
    mode: str
    trans_a: bool = False
    trans_b: bool = False
    bench: bool = False

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise NotImplementedError(f"mode={self.mode!r} is unknown: use one of {', '.join(_MODES)}")
        self._index = BlockIndex(self.layout, self.block)

    def make_lut(self, dtype: torch.dtype | None, device: torch.device) -> BlockIndex:
        """Return the positions of the blocks, on ``device``; cached."""
        self._index = self._index.to(torch.device(device))
        return self._index

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        index = self.make_lut(a.dtype, a.device)
        a, b = _with_four_dims(a), _with_four_dims(b)
        rows, columns, heads = index.rows * self.block, index.columns * self.block, index.heads
        if self.mode == "sdd":
            a, b = _maybe_transposed(a, self.trans_a), _maybe_transposed(b, self.trans_b)
            _check_side("a", a, heads, -2, rows)
            _check_side("b", b, heads, -1, columns)
            return Sampled.apply(a, b, index)
        if self.mode == "dsd":
            index.check(a, "a")
            b = _maybe_transposed(b, self.trans_b)
            _check_side("b", b, heads, -2, rows if self.trans_a else columns)
            return TimesDense.apply(a, b, index, self.trans_a)
        index.check(b, "b")
        a = _maybe_transposed(a, self.trans_a)
        _check_side("a", a, heads, -1, columns if self.trans_b else rows)
        return TimesDense.apply(b, a.mT, index, not self.trans_b).mT


class Sampled(torch.autograd.Function):
    """`sampled` with gradients for both operands."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, index: BlockIndex) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.index = index
        return sampled(a, b, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        a, b = ctx.saved_tensors
        grad_a = times_dense(grad, b.mT, ctx.index) if ctx.needs_input_grad[0] else None
        grad_b = times_dense(grad, a, ctx.index, transposed=True).mT if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None


class TimesDense(torch.autograd.Function):
    """`times_dense` with gradients for both operands."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, b: Tensor, index: BlockIndex, transposed: bool) -> Tensor:
        ctx.save_for_backward(blocks, b)
        ctx.index, ctx.transposed = index, transposed
        return times_dense(blocks, b, index, transposed=transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        blocks, b = ctx.saved_tensors
        grad_blocks, grad_b = None, None
        if ctx.needs_input_grad[0]:
            left, right = (b, grad) if ctx.transposed else (grad, b)
            grad_blocks = sampled(left, right.mT, ctx.index)
        if ctx.needs_input_grad[1]:
            grad_b = times_dense(blocks, grad, ctx.index, transposed=not ctx.transposed)
        return grad_blocks, grad_b, None, None


def _with_four_dims(x: Tensor) -> Tensor:
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x


def _maybe_transposed(x: Tensor, transposed: bool) -> Tensor:
    return x.mT if transposed else x


def _check_side(name: str, x: Tensor, heads: int, dim: int, expected: int) -> None:
    if x.shape[1] != heads or x.shape[dim] != expected:
        side = "rows" if dim == -2 else "columns"
        raise ValueError(
            f"{name} has {x.shape[1]} heads and {x.shape[dim]} {side} (after transposing); the layout asks for "
            f"{heads} and {expected}"
        )
