"""Integer weights: removal of rows and columns, and byte layout.

A weight of shape [rows, ...] is viewed as a matrix [rows, columns]. Its value is `level * scale`, or `level * scale
+ zero point`, where the levels are integers and each group of consecutive elements has a scale
(`ops/formats/integers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepspeed.compression.utils import SYMMETRIC
from deepspeed.ops.formats.integers import asymmetric_levels, binary_levels, symmetric_levels, ternary_levels

MAX_BITS = 8
"""Wider levels are not packed."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Mapping from codes (from 0 upward) to levels: level = ``first`` + ``step`` * code."""

    bits: int
    first: int
    step: int = 1

    def of(self, levels: Tensor) -> Tensor:
        return ((levels - self.first) // self.step).to(torch.uint8)

    def levels(self, codes: Tensor) -> Tensor:
        """Return the levels of ``codes``, int16."""
        return codes.to(torch.int16).mul_(self.step).add_(self.first)

    @property
    def has_zero(self) -> bool:
        return self.step == 1

    @classmethod
    def made_by(cls, bits: int, kind: str) -> Codes:
        """Return the codes of the weight quantizer for ``bits``: one bit encodes -1 and 1, two encode -1, 0 and 1."""
        if bits <= 2:
            return cls(1, -1, 2) if bits == 1 else cls(2, -1)
        return cls(bits, -(2 ** (bits - 1)) if kind == SYMMETRIC else 0)


@dataclass(slots=True)
class Grid:
    """The integers that a weight was rounded to; pruning of the weight is applied to them too.

    ``levels``: int16, of the weight's shape. ``scales`` and ``zeros`` (None if symmetric): fp32 [groups].
    ``rows`` and ``columns``: indices left of the rounded ``shape`` (rows, columns); None: all.
    """

    codes: Codes
    levels: Tensor
    scales: Tensor
    zeros: Tensor | None
    shape: tuple[int, int]
    rows: Tensor | None = None
    columns: Tensor | None = None
    exact: bool = True
    """Whether the codes represent masked weights as exactly zero."""

    @classmethod
    def of(cls, weight: Tensor, bits: int, kind: str, groups: int) -> Grid:
        """Round ``weight`` to nearest, as the quantizer for ``bits`` does; ``groups`` divides its size."""
        grouped = weight.detach().reshape(groups, -1).float()
        zeros = None
        if bits == 1:
            levels, scales = binary_levels(grouped)
        elif bits == 2:
            levels, scales = ternary_levels(grouped)
        elif kind == SYMMETRIC:
            levels, scales = symmetric_levels(grouped, bits)
        else:
            levels, scales, zeros = asymmetric_levels(grouped, bits)
        whole = levels.to(torch.int16).view(weight.shape)
        matrix = (weight.shape[0], weight.numel() // max(weight.shape[0], 1))
        flat = None if zeros is None else zeros.view(-1)
        return cls(Codes.made_by(bits, kind), whole, scales.view(-1), flat, matrix)

    @property
    def aligned(self) -> bool:
        """Return whether each group is whole rows, or each row whole groups."""
        groups = self.scales.numel()
        return self.shape[0] % groups == 0 or groups % self.shape[0] == 0

    def keep(self, kept: Tensor, dim: int) -> None:
        """Keep only the entries ``kept`` (boolean) along a dimension of the weight."""
        index = kept.nonzero().view(-1)
        size = self.levels.shape[dim]
        self.levels = self.levels.index_select(dim, index)
        if dim == 0:
            self.rows = index if self.rows is None else self.rows[index]
            return
        columns = (
            self.columns if self.columns is not None else torch.arange(self.shape[1], device=index.device)
        )
        self.columns = columns.view(size, -1)[index].flatten()  # a channel has several

    def mask(self, mask: Tensor) -> None:
        """Zero the weights where ``mask``, which broadcasts over them, is zero."""
        gone = ~mask.bool().expand_as(self.levels)
        if self.zeros is None:
            if not self.codes.has_zero:
                self.codes = Codes(2, -1)
            self.levels = self.levels.masked_fill(gone, 0)
            return
        scale, zero = self._per_element(self.scales), self._per_element(self.zeros)
        level = (-zero / torch.where(scale == 0, 1.0, scale)).round_()
        level = level.clamp_(0, 2**self.codes.bits - 1).to(torch.int16)
        self.exact &= not bool((gone & (level * scale + zero != 0)).any())
        self.levels = torch.where(gone, level, self.levels)

    def _per_element(self, of_groups: Tensor) -> Tensor:
        """Expand values per group to the shape of the levels."""
        rows, columns = (
            torch.arange(size, device=of_groups.device) if left is None else left
            for size, left in zip(self.shape, (self.rows, self.columns), strict=True)
        )
        size = self.shape[0] * self.shape[1] // of_groups.numel()
        return of_groups[(rows[:, None] * self.shape[1] + columns) // size].view(self.levels.shape)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the rounded weight in ``dtype``, before rows and columns are removed."""
        grouped = self.levels.reshape(self.scales.numel(), -1).float().mul_(self.scales[:, None])
        if self.zeros is not None:
            grouped.add_(self.zeros[:, None])
        return grouped.to(dtype).view(self.levels.shape)

    def compacted(self) -> tuple[Grid, Tensor | None] | None:
        """Return the grid of the smaller weight, whose groups are again consecutive elements of equal number, and None;
        if columns were removed from groups, the grid with scales [rows * groups per row] and the group of each column.

        None if there is no such grid: groups that span parts of several rows lost elements, or zeros are not exact.
        """
        if not self.exact:
            return None
        if self.rows is None and self.columns is None:
            return self, None
        if not self.aligned:
            return None
        (rows, columns), groups = self.shape, self.scales.numel()
        per_row = max(groups // rows, 1)
        group_of_row = torch.arange(rows, device=self.scales.device) * groups // rows
        kept = group_of_row if self.rows is None else group_of_row[self.rows]
        chosen = (kept[:, None] + torch.arange(per_row, device=kept.device)).flatten()
        zeros = None if self.zeros is None else self.zeros[chosen]
        left = (self.levels.shape[0], self.levels.numel() // max(self.levels.shape[0], 1))
        smaller = replace(self, scales=self.scales[chosen], zeros=zeros, shape=left, rows=None, columns=None)
        if self.columns is None or per_row == 1:
            return smaller, None
        return smaller, (self.columns // (columns // per_row)).to(torch.int16)
