"""Softmax over the rows of a block-sparse matrix."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.sparse_attention.products import BlockIndex


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def num_warps(n: int) -> int:
    """Warps of a GPU kernel for rows of ``n`` elements."""
    if n < 512:
        return 4
    return 8 if n < 2048 else 16


class Softmax:
    """Softmax of the rows of a block-sparse matrix: [batch, number of blocks, block, block] in and out, in the order of
    ``layout.nonzero()``. Blocks that the layout does not have count as -inf; a row that sees nothing gives zeros.

    Args:
        layout: [heads, block rows, block columns].
        block: tokens along one side of a block.
        bench: accepted for compatibility.
    """

    def __init__(self, layout: Tensor, block: int, bench: bool = False) -> None:
        self.layout = layout
        self.block = block
        self.bench = bench
        self._index = BlockIndex(layout, block)

    @staticmethod
    def sparse_softmax(x: Tensor, index: BlockIndex) -> Tensor:
        """Softmax of blocks alone, without scale and masks."""
        return _RowSoftmax.apply(x, index)

    def make_lut(self, device: torch.device) -> BlockIndex:
        """Return the positions of the blocks, on ``device``; made once and kept."""
        self._index = self._index.to(torch.device(device))
        return self._index

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> Tensor:
        """``softmax(x * scale + rpe + masks)``.

        Args:
            x: the blocks of the scores.
            scale: factor of the scores.
            rpe: relative positions, broadcastable to [batch, heads, rows, columns]; has a gradient.
            key_padding_mask: [batch, columns].
            attn_mask: [rows, columns].
            key_padding_mask_mode, attn_mask_mode: "add": the mask is added to the scores; "mul": 0 hides, anything
                else shows.

        Raises:
            ValueError: shapes that do not fit, or another mode.
        """
        index = self.make_lut(x.device)
        index.check(x, "x")
        scores = x * scale
        if rpe is not None:
            scores = scores + blocks_of(rpe, index)
        if attn_mask is not None:
            mask = as_bias(attn_mask, attn_mask_mode, "attn_mask", x.dtype)
            scores = scores + blocks_of(mask, index)
        if key_padding_mask is not None:
            bias = as_bias(key_padding_mask, key_padding_mask_mode, "key_padding_mask", x.dtype)
            scores = scores + columns_of(bias, index).unsqueeze(-2)
        return self.sparse_softmax(scores, index)


def as_bias(mask: Tensor, mode: str, name: str, dtype: torch.dtype) -> Tensor:
    """Return the term added to the scores for a mask of this mode. ValueError: another mode."""
    if mode not in ("add", "mul"):
        raise ValueError(f"{name}_mode={mode!r} is unknown: use 'add' or 'mul'")
    if mode == "mul" or mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask == 0, -math.inf)
    return mask.to(dtype)


def blocks_of(dense: Tensor, index: BlockIndex) -> Tensor:
    """The blocks of ``dense`` [(batch,) (heads,) rows, columns] that the layout has, [batch or 1, blocks, block,
    block]. ValueError: another size."""
    block = index.block
    rows, columns = index.rows * block, index.columns * block
    if tuple(dense.shape[-2:]) != (rows, columns) or dense.dim() > 4:
        raise ValueError(
            f"a mask or bias of shape {list(dense.shape)} does not fit scores of {rows} x {columns} tokens"
        )
    while dense.dim() < 4:
        dense = dense.unsqueeze(0)
    if dense.shape[1] not in (1, index.heads):
        raise ValueError(f"a bias has {dense.shape[1]} heads, the layout {index.heads}")
    tiles = dense.unflatten(3, (index.columns, block)).unflatten(2, (index.rows, block)).transpose(3, 4)
    head = index.head if dense.shape[1] > 1 else torch.zeros_like(index.head)
    return tiles[:, head, index.row % index.rows, index.column % index.columns]


def columns_of(bias: Tensor, index: BlockIndex) -> Tensor:
    """[batch, columns] by blocks, [batch, blocks, block]. ValueError: another size."""
    if bias.dim() != 2 or bias.shape[1] != index.columns * index.block:
        raise ValueError(
            f"key_padding_mask is [batch, {index.columns * index.block}], got {list(bias.shape)}"
        )
    return bias.unflatten(1, (index.columns, index.block))[:, index.column % index.columns]


class _RowSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: BlockIndex) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rows = (x.shape[0], index.heads * index.rows, index.block)
        row = index.row[None, :, None].expand(x.shape[0], -1, index.block)
        top = wide.new_full(rows, -math.inf).scatter_reduce(1, row, wide.amax(-1), "amax")
        top = top.masked_fill_(top == -math.inf, 0.0)  # exp(-inf - 0) = 0 where nothing is seen
        weights = torch.exp(wide - top[:, index.row].unsqueeze(-1))
        total = wide.new_zeros(rows).index_add_(1, index.row, weights.sum(-1))
        total.masked_fill_(total == 0, 1.0)
        out = (weights / total[:, index.row].unsqueeze(-1)).to(x.dtype)
        ctx.save_for_backward(out)
        ctx.index = index
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        (out,) = ctx.saved_tensors
        index = ctx.index
        wide = torch.promote_types(out.dtype, torch.float32)
        weighted = out.to(wide) * grad.to(wide)
        rows = weighted.new_zeros((out.shape[0], index.heads * index.rows, index.block))
        spread = rows.index_add_(1, index.row, weighted.sum(-1))[:, index.row].unsqueeze(-1)
        return (weighted - out.to(wide) * spread).to(out.dtype), None
