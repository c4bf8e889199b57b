"""Softmax over the rows of a block-sparse matrix, and helpers shared with products of such matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# ---- products of block-sparse matrices in plain PyTorch: work and memory proportional to the number of blocks
#
# A sparse matrix is a layout [heads, block rows, block columns] and its blocks [batch, number of blocks, block, block],
# in the order of ``layout.nonzero()``. Dense matrices are [batch, heads, rows, columns]. Block-sparse products as in
# S. Gray et al.: GPU kernels for block-sparse weights, 2017.

_CHUNK = 1 << 22
"""Most elements of a gathered operand at a time (16 MiB in fp32)."""


class BlockIndex:
    """Row and column indices of a layout's blocks. ValueError: the layout does not have three dims."""

    def __init__(self, layout: Tensor, block: int) -> None:
        if layout.dim() != 3:
            raise ValueError(f"a layout must be [heads, block rows, block columns], not {list(layout.shape)}")
        self.layout = layout
        self.block = block
        heads, rows, columns = layout.shape
        self.heads, self.rows, self.columns = int(heads), int(rows), int(columns)
        head, row, column = layout.nonzero().unbind(1)
        self.head = head
        self.row = head * self.rows + row
        """Per block: index of its block row among those of all heads."""
        self.column = head * self.columns + column

    def __len__(self) -> int:
        return len(self.row)

    def to(self, device: torch.device) -> BlockIndex:
        """Return the index on ``device``; itself if it is already there."""
        return self if self.row.device == device else BlockIndex(self.layout.to(device), self.block)

    def check(self, blocks: Tensor, name: str) -> None:
        """Raise ValueError if ``blocks`` does not have this layout's shape."""
        expected = (len(self), self.block, self.block)
        if blocks.dim() != 4 or tuple(blocks.shape[1:]) != expected:
            raise ValueError(
                f"{name} is block-sparse: expected [batch, {', '.join(map(str, expected))}], got {list(blocks.shape)}"
            )


def sampled(a: Tensor, b: Tensor, index: BlockIndex) -> Tensor:
    """Return the layout's blocks of ``a @ b``; ``a`` [batch, heads, rows, k], ``b`` [batch, heads, k, columns]."""
    a_panels, b_panels = _panels(a, index.rows, index.block), _panels(b.mT, index.columns, index.block)
    out = a.new_empty((a.shape[0], len(index), index.block, index.block))
    for part in _parts(len(index), a.shape[0] * index.block * a.shape[-1]):
        left, right = a_panels.index_select(1, index.row[part]), b_panels.index_select(1, index.column[part])
        out[:, part] = left @ right.mT
    return out


def times_dense(blocks: Tensor, b: Tensor, index: BlockIndex, *, transposed: bool = False) -> Tensor:
    """Multiply the sparse matrix (or its transpose) with ``b`` [batch, heads, columns (rows), n]."""
    source, target = (index.row, index.column) if transposed else (index.column, index.row)
    source_count, target_count = (index.rows, index.columns) if transposed else (index.columns, index.rows)
    panels = _panels(b, source_count, index.block)
    wide = torch.promote_types(b.dtype, torch.float32)
    out = torch.zeros(
        (b.shape[0], index.heads * target_count, index.block, b.shape[-1]), dtype=wide, device=b.device
    )
    for part in _parts(len(index), b.shape[0] * index.block * b.shape[-1]):
        left = blocks[:, part].mT if transposed else blocks[:, part]
        out.index_add_(1, target[part], (left @ panels.index_select(1, source[part])).to(wide))
    return out.to(b.dtype).reshape(b.shape[0], index.heads, target_count * index.block, b.shape[-1])


def _panels(dense: Tensor, count: int, block: int) -> Tensor:
    """View [batch, heads, count * block, k] as [batch, heads * count, block, k]."""
    return dense.reshape(dense.shape[0], dense.shape[1] * count, block, dense.shape[-1])


def _parts(count: int, elements: int) -> list[slice]:
    """Slice ``count`` blocks into chunks, for an operand with ``elements`` per block."""
    size = max(1, _CHUNK // max(1, elements))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@dataclass(eq=False)
class Softmax:
    """Softmax over the rows of a block-sparse matrix: [batch, number of blocks, block, block] in and out, in the order
    of ``layout.nonzero()``. Missing blocks count as -inf; a fully masked row gives zeros.

    Args:
        layout: [heads, block rows, block columns].
        block: tokens along one side of a block.
        bench: accepted for compatibility.
    """

    layout: Tensor
    block: int
    bench: bool = False

    def __post_init__(self) -> None:
        self._index = BlockIndex(self.layout, self.block)

    @staticmethod
    def sparse_softmax(x: Tensor, index: BlockIndex) -> Tensor:
        """Compute the softmax of blocks, without scale and masks."""
        return _RowSoftmax.apply(x, index)

    def make_lut(self, device: torch.device) -> BlockIndex:
        """Return the index of the blocks on ``device``, cached."""
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
        """Return ``softmax(x * scale + rpe + masks)``.

        Args:
            x: the blocks of the scores.
            scale: factor of the scores.
            rpe: relative position bias, broadcastable to [batch, heads, rows, columns]; has a gradient.
            key_padding_mask: [batch, columns].
            attn_mask: [rows, columns].
            key_padding_mask_mode, attn_mask_mode: "add": the mask is added to the scores; "mul": 0 masks, anything
                else does not.

        Raises:
            ValueError: mismatched shapes, or an unknown mode.
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
    """Return the term to add to the scores for a mask of this mode. ValueError: unknown mode."""
    if mode not in ("add", "mul"):
        raise ValueError(f"{name}_mode={mode!r} is unknown: use 'add' or 'mul'")
    if mode == "mul" or mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask == 0, -math.inf)
    return mask.to(dtype)


def blocks_of(dense: Tensor, index: BlockIndex) -> Tensor:
    """Select the layout's blocks of ``dense`` [(batch,) (heads,) rows, columns] -> [batch or 1, blocks, block, block].
    ValueError: another size."""
    block = index.block
    rows, columns = index.rows * block, index.columns * block
    if tuple(dense.shape[-2:]) != (rows, columns) or dense.dim() > 4:
        raise ValueError(
            f"a mask or bias of shape {list(dense.shape)} does not fit scores of {rows} x {columns} tokens"
        )
    while dense.dim() < 4:
        dense = dense.unsqueeze(0)
    if dense.shape[1] not in (1, index.heads):
        raise ValueError(f"the bias has {dense.shape[1]} heads, but the layout has {index.heads}")
    tiles = dense.unflatten(3, (index.columns, block)).unflatten(2, (index.rows, block)).transpose(3, 4)
    head = index.head if dense.shape[1] > 1 else torch.zeros_like(index.head)
    return tiles[:, head, index.row % index.rows, index.column % index.columns]


def columns_of(bias: Tensor, index: BlockIndex) -> Tensor:
    """Select [batch, columns] by blocks -> [batch, blocks, block]. ValueError: another size."""
    if bias.dim() != 2 or bias.shape[1] != index.columns * index.block:
        raise ValueError(
            f"key_padding_mask must be [batch, {index.columns * index.block}], got {list(bias.shape)}"
        )
    return bias.unflatten(1, (index.columns, index.block))[:, index.column % index.columns]


class _RowSoftmax(torch.autograd.Function):
    """Softmax of each row over its blocks [batch, blocks, block, block], in fp32 inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: BlockIndex) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rows = (x.shape[0], index.heads * index.rows, index.block)
        row = index.row[None, :, None].expand(x.shape[0], -1, index.block)
        top = wide.new_full(rows, -math.inf).scatter_reduce(1, row, wide.amax(-1), "amax")
        top = top.masked_fill_(top == -math.inf, 0.0)  # exp(-inf - 0) = 0 in fully masked rows
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
