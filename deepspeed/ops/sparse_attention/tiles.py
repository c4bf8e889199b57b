"""Tiling of a layout: rows that see nearly the same blocks share one dense product, made once per layout.

Products of single blocks of 16 tokens leave a processor idle. So columns that many neighbouring rows have in common
are computed for all of these at once. Of what remains, neighbouring rows are joined to a *tile*, whose columns are all
that one of its rows sees; what a row does not see there is masked. Where joining pays is decided by the least cost over
the whole layout, counted in blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed.ops.sparse_attention.host_attention import RowLists

_ROWS = 64
"""Tokens in the rows of a tile, at most (one block row always)."""

_RUN, _IN_COMMON = 768, 128
"""Tokens in rows that are searched for common columns, and tokens in such columns that make a product worthwhile."""

_PER_COLUMN, _PER_TILE = 1.0, 4.0
"""What gathering the keys of a column costs, and a tile as such, in products of two blocks."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of one size. ``rows`` [tiles, n] and ``columns`` [tiles, w] are block indices; ``seen`` bool [tiles, n, w],
    None if every row of each tile sees all its columns. ``earlier``: all columns come before all rows of their tile.
    ``joins``: other tiles have further columns of the same rows, and come before."""

    rows: Tensor
    columns: Tensor
    seen: Tensor | None
    earlier: bool = False
    joins: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def blocks(self) -> int:
        """Products of two blocks that all of them need."""
        return self.rows.numel() * self.columns.shape[1]

    def parts(self, size: int) -> Iterator[Tiles]:
        """The same, ``size`` at a time."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            seen = None if self.seen is None else self.seen[part]
            yield replace(self, rows=self.rows[part], columns=self.columns[part], seen=seen)

    def to(self, device: torch.device) -> Tiles:
        seen = None if self.seen is None else self.seen.to(device)
        return replace(self, rows=self.rows.to(device), columns=self.columns.to(device), seen=seen)


@dataclass(frozen=True)
class Pattern:
    """The tiles of all heads that have the same layout; ``heads`` None: all of them."""

    heads: Tensor | None
    tiles: tuple[Tiles, ...]


class TilePlan:
    """Plan of the computation of a layout [heads, block rows, block columns].

    ``blocks``: blocks that exist, over all heads. ``computed``: blocks that tiles compute, including those that are
    masked.
    """

    def __init__(self, layout: Tensor, block: int) -> None:
        self.block = block
        self.heads, self.rows, self.columns = (int(size) for size in layout.shape)
        self.device = torch.device("cpu")
        found: dict[bytes, list[int]] = defaultdict(list)
        flags = (layout != 0).cpu()
        for head in range(self.heads):
            found[flags[head].numpy().tobytes()].append(head)
        self._heads_of = list(found.values())
        self._flags = flags[[heads[0] for heads in self._heads_of]]  # [different layouts, rows, columns]
        self.blocks = int(flags.sum())
        self.on_devices: dict[tuple[torch.device, bool], Any] = {}
        """What kernels of a device have made of the layout, without and with what comes later (see
        ``gpu_attention``)."""

    @cached_property
    def patterns(self) -> list[Pattern]:
        """Return the patterns of the tiles. Not made where the host's kernel walks the blocks."""
        alike = len(self._heads_of) == 1
        return [
            Pattern(None if alike else torch.tensor(heads), _tiles(flags, self.block))
            for heads, flags in zip(self._heads_of, self._flags, strict=True)
        ]

    @cached_property
    def row_lists(self) -> RowLists:
        return RowLists(self._flags, self._layout_of)

    def lists(self, *, causal: bool) -> tuple[RowLists, RowLists]:
        """By rows, and by columns (the rows that see each). ``causal``: without blocks of later tokens."""
        flags = self._flags.tril() if causal else self._flags
        return RowLists(flags, self._layout_of), RowLists(flags.mT, self._layout_of)

    @property
    def heads_of(self) -> list[list[int]]:
        """The heads that have each of the different layouts."""
        return self._heads_of

    @property
    def _layout_of(self) -> list[int]:
        layout_of = [0] * self.heads
        for number, heads in enumerate(self._heads_of):
            for head in heads:
                layout_of[head] = number
        return layout_of

    @cached_property
    def computed(self) -> int:
        return sum(
            tiles.blocks * (self.heads if pattern.heads is None else len(pattern.heads))
            for pattern in self.patterns
            for tiles in pattern.tiles
        )

    def to(self, device: torch.device) -> TilePlan:
        """Move the indices to ``device``; returns itself."""
        if device != self.device:
            self.patterns = [
                Pattern(
                    None if each.heads is None else each.heads.to(device),
                    tuple(tiles.to(device) for tiles in each.tiles),
                )
                for each in self.patterns
            ]
            self.device = device
        return self


def _tiles(layout: Tensor, block: int) -> tuple[Tiles, ...]:
    masks = [_bits(row) for row in layout]
    common = _common(masks, max(1, _RUN // block), max(1, _IN_COMMON // block))
    for rows, columns in common:
        for row in rows:
            masks[row] &= ~columns
    small = []
    for rows in _cuts(masks, max(1, _ROWS // block)):
        union = 0
        for row in rows:
            union |= masks[row]
        if union:
            small.append((rows, union))
    return (*_by_size(masks, common, exact=True), *_by_size(masks, small, joins=bool(common)))


def _common(masks: list[int], run: int, worthwhile: int) -> list[tuple[range, int]]:
    """Runs of rows with the columns that all of them see."""
    found = []
    for start in range(0, len(masks), run):
        rows = range(start, min(start + run, len(masks)))
        columns = masks[start]
        for row in rows:
            columns &= masks[row]
        if len(rows) > 1 and columns.bit_count() >= worthwhile:
            found.append((rows, columns))
    return found


def _by_size(
    masks: list[int], found: list[tuple[range, int]], *, exact: bool = False, joins: bool = False
) -> Iterator[Tiles]:
    """Tiles of about one size together; ``exact``: every row sees all columns."""
    by_size: dict[tuple[int, int, bool], list[tuple[range, list[int]]]] = defaultdict(list)
    for rows, union in found:
        columns = _set_bits(union)
        by_size[len(rows), _rounded(len(columns)), columns[-1] < rows[0]].append((rows, columns))
    for (_, width, earlier), tiles in sorted(by_size.items()):
        columns = torch.tensor([own + own[:1] * (width - len(own)) for _, own in tiles])
        seen = torch.tensor(
            [
                [
                    [
                        at < len(own) and (exact or masks[row] >> column & 1 == 1)
                        for at, column in enumerate(padded)
                    ]
                    for row in rows
                ]
                for (rows, own), padded in zip(tiles, columns.tolist(), strict=True)
            ]
        )
        yield Tiles(
            torch.tensor([list(rows) for rows, _ in tiles]),
            columns,
            None if bool(seen.all()) else seen,
            earlier=earlier,
            joins=joins,
        )


def _cuts(masks: list[int], most: int) -> list[range]:
    """The rows in runs of at most ``most``, at the least cost."""
    best = [0.0] + [float("inf")] * len(masks)
    start_of = [0] * (len(masks) + 1)
    for end in range(1, len(masks) + 1):
        union = 0
        for start in range(end - 1, max(-1, end - 1 - most), -1):
            union |= masks[start]
            cost = best[start] + _cost(end - start, union.bit_count())
            if cost < best[end]:
                best[end], start_of[end] = cost, start
    found, end = [], len(masks)
    while end:
        found.append(range(start_of[end], end))
        end = start_of[end]
    return found[::-1]


def _cost(rows: int, columns: int) -> float:
    return rows * columns + _PER_COLUMN * columns + _PER_TILE if columns else 0.0


def _rounded(width: int) -> int:
    """Tiles of nearly one width are computed together: at most an eighth is padded."""
    step = 1 << max(0, width.bit_length() - 4)
    return -(-width // step) * step


def _bits(row: Tensor) -> int:
    """A row of flags as one number, bit i for column i."""
    return int.from_bytes(np.packbits(row.numpy(), bitorder="little").tobytes(), "little")


def _set_bits(number: int) -> list[int]:
    found = []
    while number:
        lowest = number & -number
        found.append(lowest.bit_length() - 1)
        number ^= lowest
    return found
