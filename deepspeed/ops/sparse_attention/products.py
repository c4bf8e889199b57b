"""Products of block-sparse matrices in plain PyTorch. Work and memory are proportional to the blocks that exist.

A sparse matrix is a layout [heads, block rows, block columns] and its blocks [batch, number of blocks, block, block],
in the order of ``layout.nonzero()``. Dense matrices are [batch, heads, rows, columns]. Block-sparse products as in
S. Gray et al.: GPU kernels for block-sparse weights, 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22
"""Elements of a gathered operand at a time (16 MiB in fp32)."""


class BlockIndex:
    """Index of a layout's blocks. ValueError: the layout has no three dimensions."""

    def __init__(self, layout: Tensor, block: int) -> None:
        if layout.dim() != 3:
            raise ValueError(f"a layout is [heads, block rows, block columns], not {list(layout.shape)}")
        self.layout = layout
        self.block = block
        heads, rows, columns = layout.shape
        self.heads, self.rows, self.columns = int(heads), int(rows), int(columns)
        head, row, column = layout.nonzero().unbind(1)
        self.head = head
        self.row = head * self.rows + row
        """Of each block: the index of its row among the rows of all heads."""
        self.column = head * self.columns + column

    def __len__(self) -> int:
        return len(self.row)

    def to(self, device: torch.device) -> BlockIndex:
        """The same on another device; itself if it is there."""
        return self if self.row.device == device else BlockIndex(self.layout.to(device), self.block)

    def check(self, blocks: Tensor, name: str) -> None:
        """ValueError: these are not the blocks of this layout."""
        expected = (len(self), self.block, self.block)
        if blocks.dim() != 4 or tuple(blocks.shape[1:]) != expected:
            raise ValueError(
                f"{name} is block-sparse: expected [batch, {', '.join(map(str, expected))}], got {list(blocks.shape)}"
            )


def sampled(a: Tensor, b: Tensor, index: BlockIndex) -> Tensor:
    """The blocks of ``a @ b`` that the layout has; ``a`` [batch, heads, rows, k], ``b`` [batch, heads, k, columns]."""
    of_a, of_b = _panels(a, index.rows, index.block), _panels(b.mT, index.columns, index.block)
    out = a.new_empty((a.shape[0], len(index), index.block, index.block))
    for part in _parts(len(index), a.shape[0] * index.block * a.shape[-1]):
        left, right = of_a.index_select(1, index.row[part]), of_b.index_select(1, index.column[part])
        out[:, part] = left @ right.mT
    return out


def times_dense(blocks: Tensor, b: Tensor, index: BlockIndex, *, transposed: bool = False) -> Tensor:
    """The sparse matrix (or its transpose) times ``b`` [batch, heads, columns (rows), n]."""
    source, target = (index.row, index.column) if transposed else (index.column, index.row)
    of_source, of_target = (index.rows, index.columns) if transposed else (index.columns, index.rows)
    panels = _panels(b, of_source, index.block)
    wide = torch.promote_types(b.dtype, torch.float32)
    out = torch.zeros(
        (b.shape[0], index.heads * of_target, index.block, b.shape[-1]), dtype=wide, device=b.device
    )
    for part in _parts(len(index), b.shape[0] * index.block * b.shape[-1]):
        left = blocks[:, part].mT if transposed else blocks[:, part]
        out.index_add_(1, target[part], (left @ panels.index_select(1, source[part])).to(wide))
    return out.to(b.dtype).reshape(b.shape[0], index.heads, of_target * index.block, b.shape[-1])


def _panels(dense: Tensor, count: int, block: int) -> Tensor:
    """[batch, heads, count * block, k] as [batch, heads * count, block, k]."""
    return dense.reshape(dense.shape[0], dense.shape[1] * count, block, dense.shape[-1])


def _parts(count: int, elements: int) -> list[slice]:
    """Slices of ``count`` blocks, for which an operand has ``elements`` each."""
    size = max(1, _CHUNK // max(1, elements))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
