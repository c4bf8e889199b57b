"""Sparsity patterns of an attention matrix, by block: the documented ones, and a base class for others.

A layout is an int64 tensor [heads, block rows, block columns] that is 1 where the block is computed. Rows are queries,
columns keys. Layouts describe whole blocks only: causality within a diagonal block is left to an attention mask.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

_KINDS = ("unidirectional", "bidirectional")


@dataclass(eq=False)
class SparsityConfig:
    """Base class of all patterns. For a custom pattern, derive from it and override ``make_layout``::

        class EverySecond(SparsityConfig):
            def make_layout(self, seq_len):
                layout = self.setup_layout(seq_len)
                for head in range(self.num_layout_heads):
                    layout[head, :, ::2] = 1
                return self.check_and_propagate_first_head_layout(layout)

    Args:
        num_heads: attention heads.
        block: tokens along one side of a block.
        different_layout_per_head: each head has its own layout; otherwise all have that of the first.

    ``random`` is the generator of random blocks: by default Python's global one, so that ``random.seed`` applies.
    """

    random: ClassVar[Any] = random
    parts: ClassVar[tuple[str, ...]] = ()
    """Names of the methods that fill in a head's layout, in order."""

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False

    def __post_init__(self) -> None:
        self.num_layout_heads = self.num_heads if self.different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> Tensor:
        """Return an empty layout for ``seq_len`` tokens. ValueError: the block size does not divide it."""
        if seq_len % self.block != 0:
            raise ValueError(
                f"a sequence of {seq_len} tokens is not a multiple of block={self.block}: pad it "
                "(SparseAttentionUtils.pad_to_block_size) or choose another block size"
            )
        blocks = seq_len // self.block
        return torch.zeros((self.num_heads, blocks, blocks), dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copy the first head's layout to all heads, unless each has its own; return the layout."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the layout for ``seq_len`` tokens."""
        if not self.parts:
            raise NotImplementedError(
                f"{type(self).__name__} has no make_layout(seq_len): use one of the patterns, FixedSparsityConfig for "
                "example, or override it"
            )
        layout = self.setup_layout(seq_len)
        for head in range(self.num_layout_heads):
            for part in self.parts:
                getattr(self, part)(head, layout)
        return self.check_and_propagate_first_head_layout(layout)

    def _random_columns(self, columns: int, wanted: int) -> list[int]:
        if wanted > columns:
            raise ValueError(f"num_random_blocks={wanted} is more than the {columns} blocks of a row")
        return self.random.sample(range(columns), wanted)


class DenseSparsityConfig(SparsityConfig):
    """All blocks: a reference, for comparisons."""

    def make_layout(self, seq_len: int) -> Tensor:
        layout = self.setup_layout(seq_len)
        layout[:] = 1
        return layout


@dataclass(eq=False)
class FixedSparsityConfig(SparsityConfig):
    """Adjacent local windows, and global blocks that represent each window and that all rows attend to.

    R. Child et al.: Generating long sequences with sparse Transformers, 2019.

    Args:
        num_local_blocks: blocks per window.
        num_global_blocks: consecutive blocks that represent a window; its last ones for the first head.
        attention: "unidirectional": no row attends to later blocks; or "bidirectional".
        horizontal_global_attention: the global blocks also attend to all blocks; only if bidirectional.
        num_different_global_patterns: number of choices of global blocks, in turn by head.

    Raises:
        ValueError: contradictory arguments. NotImplementedError: unknown ``attention``.
    """

    parts = ("set_local_layout", "set_global_layout")

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        choices, patterns = (
            self.num_local_blocks // max(self.num_global_blocks, 1),
            self.num_different_global_patterns,
        )
        if self.num_global_blocks < 1 or self.num_local_blocks % self.num_global_blocks != 0:
            raise ValueError(
                f"num_local_blocks={self.num_local_blocks} must be a multiple of "
                f"num_global_blocks={self.num_global_blocks}"
            )
        _check_attention(self.attention, self.horizontal_global_attention)
        if patterns > 1 and not self.different_layout_per_head:
            raise ValueError(f"num_different_global_patterns={patterns} needs different_layout_per_head=True")
        if patterns > choices:
            raise ValueError(
                f"num_different_global_patterns={patterns} is more than the {choices} choices in a window "
                "(num_local_blocks / num_global_blocks)"
            )

    def set_local_layout(self, h: int, layout: Tensor) -> Tensor:
        blocks = layout.shape[1]
        windows = [
            (start, min(start + self.num_local_blocks, blocks))
            for start in range(0, blocks, self.num_local_blocks)
        ]
        return _set_windows(layout, h, windows, self.attention)

    def set_global_layout(self, h: int, layout: Tensor) -> Tensor:
        blocks = layout.shape[1]
        choice = 1 + h % self.num_different_global_patterns
        offset = self.num_local_blocks - choice * self.num_global_blocks
        whole = blocks - blocks % self.num_local_blocks
        ranges = [
            (start, start + self.num_global_blocks) for start in range(offset, whole, self.num_local_blocks)
        ]
        if whole < blocks:  # a shorter last window: move its global blocks back into it
            start = min(whole + offset, blocks - self.num_global_blocks)
            ranges.append((start, start + self.num_global_blocks))
        return _set_global(layout, h, ranges, self.attention, self.horizontal_global_attention)


@dataclass(eq=False)
class VariableSparsityConfig(SparsityConfig):
    """Local windows of given sizes, global blocks at given positions, and random blocks.

    Args:
        num_random_blocks: random blocks per row.
        local_window_blocks: sizes of the windows in order; the last size repeats.
        global_block_indices: the global blocks, or, with ``global_block_end_indices``, the starts of global ranges.
        global_block_end_indices: ends of the ranges, exclusive.
        attention, horizontal_global_attention: as in `FixedSparsityConfig`.

    Raises:
        ValueError: contradictory arguments. NotImplementedError: unknown ``attention``.
    """

    parts = ("set_random_layout", "set_local_layout", "set_global_layout")

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = field(default_factory=lambda: [4])
    global_block_indices: Sequence[int] = field(default_factory=lambda: [0])
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.local_window_blocks = list(self.local_window_blocks)
        _check_attention(self.attention, self.horizontal_global_attention)
        _list_ranges(self)
        if not self.local_window_blocks or min(self.local_window_blocks) < 1:
            raise ValueError(f"local_window_blocks={self.local_window_blocks} needs sizes of at least 1")

    def set_random_layout(self, h: int, layout: Tensor) -> Tensor:
        return _set_random(self, layout, h, self.num_random_blocks, self.attention)

    def set_local_layout(self, h: int, layout: Tensor) -> Tensor:
        blocks, start, windows = layout.shape[1], 0, []
        sizes = iter(self.local_window_blocks)
        size = 0
        while start < blocks:
            size = next(sizes, size)
            windows.append((start, min(start + size, blocks)))
            start += size
        return _set_windows(layout, h, windows, self.attention)

    def set_global_layout(self, h: int, layout: Tensor) -> Tensor:
        ranges = _ranges(self.global_block_indices, self.global_block_end_indices, layout.shape[1])
        return _set_global(layout, h, ranges, self.attention, self.horizontal_global_attention)


@dataclass(eq=False)
class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, the first blocks global in both directions, and random blocks.

    M. Zaheer et al.: Big Bird: Transformers for longer sequences, 2020 (the variant in which global tokens are tokens
    of the sequence).

    Args:
        num_random_blocks: random blocks per row.
        num_sliding_window_blocks: blocks per window, centered on the row's own block.
        num_global_blocks: the first blocks, which attend to all blocks and are attended to by all.
        attention: "unidirectional": no row attends to later blocks; or "bidirectional".

    Raises:
        NotImplementedError: unknown ``attention``. ``make_layout`` raises ValueError for sequences with fewer blocks
            than one of the numbers.
    """

    parts = ("set_random_layout", "set_sliding_window_layout", "set_global_layout_itc")

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attention(self.attention)

    def set_random_layout(self, h: int, layout: Tensor) -> Tensor:
        return _set_random(self, layout, h, self.num_random_blocks, self.attention)

    def set_sliding_window_layout(self, h: int, layout: Tensor) -> Tensor:
        return _set_sliding_window(layout, h, self.num_sliding_window_blocks)

    def set_global_layout_itc(self, h: int, layout: Tensor) -> Tensor:
        _check_fits("num_global_blocks", self.num_global_blocks, layout)
        layout[h, : self.num_global_blocks, :] = 1
        layout[h, :, : self.num_global_blocks] = 1
        return _without_later(layout, h, self.attention)


@dataclass(eq=False)
class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and given blocks that are global in both directions: a blockwise Longformer.

    I. Beltagy et al.: Longformer: The long-document Transformer, 2020.

    Args:
        num_sliding_window_blocks: blocks per window, centered on the row's own block.
        global_block_indices, global_block_end_indices: as in `VariableSparsityConfig`.
        attention: "unidirectional": no row attends to later blocks; or "bidirectional".

    Raises:
        ValueError: invalid global ranges. NotImplementedError: unknown ``attention``.
    """

    parts = ("set_sliding_window_layout", "set_global_layout")

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = field(default_factory=lambda: [0])
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attention(self.attention)
        _list_ranges(self)

    def set_sliding_window_layout(self, h: int, layout: Tensor) -> Tensor:
        return _set_sliding_window(layout, h, self.num_sliding_window_blocks)

    def set_global_layout(self, h: int, layout: Tensor) -> Tensor:
        for start, end in _ranges(self.global_block_indices, self.global_block_end_indices, layout.shape[1]):
            layout[h, start:end, :] = 1
            layout[h, :, start:end] = 1
        return _without_later(layout, h, self.attention)


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window only, the same for all heads.

    Args:
        num_sliding_window_blocks: blocks per window, centered on the row's own block; unidirectional rows have only
            the half up to their own.
        attention: "unidirectional" or "bidirectional".
    """

    parts = ("set_sliding_window_layout",)

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: str = "unidirectional",
    ) -> None:
        super().__init__(num_heads, block)
        _check_attention(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.attention = attention

    def set_sliding_window_layout(self, h: int, layout: Tensor) -> Tensor:
        _set_sliding_window(layout, h, self.num_sliding_window_blocks)
        return _without_later(layout, h, self.attention)


def _set_windows(layout: Tensor, h: int, windows: Iterable[tuple[int, int]], attention: str) -> Tensor:
    """Set the square of each window, up to the diagonal if unidirectional."""
    for start, end in windows:
        square = torch.ones((end - start, end - start), dtype=layout.dtype)
        layout[h, start:end, start:end] |= square.tril_() if attention == "unidirectional" else square
    return layout


def _set_global(
    layout: Tensor, h: int, ranges: Iterable[tuple[int, int]], attention: str, horizontal: bool
) -> Tensor:
    """Set columns that all rows (unidirectional: from the range on) attend to, and rows to all if ``horizontal``."""
    for start, end in ranges:
        layout[h, start if attention == "unidirectional" else 0 :, start:end] = 1
        if horizontal:
            layout[h, start:end, :] = 1
    return layout


def _set_random(config: SparsityConfig, layout: Tensor, h: int, wanted: int, attention: str) -> Tensor:
    """Set ``wanted`` random blocks per row, only up to its own (fewer near the start) if unidirectional."""
    blocks = layout.shape[1]
    _check_fits("num_random_blocks", wanted, layout)
    for row in range(blocks):
        seen = blocks if attention == "bidirectional" else row + 1
        layout[h, row, config._random_columns(seen, min(wanted, seen))] = 1
    return layout


def _set_sliding_window(layout: Tensor, h: int, width: int) -> Tensor:
    _check_fits("num_sliding_window_blocks", width, layout)
    rows = torch.arange(layout.shape[1])
    layout[h] |= ((rows[:, None] - rows).abs() <= width // 2).to(layout.dtype)
    return layout


def _without_later(layout: Tensor, h: int, attention: str) -> Tensor:
    if attention == "unidirectional":
        layout[h].tril_()
    return layout


def _ranges(starts: Sequence[int], ends: Sequence[int] | None, blocks: int) -> list[tuple[int, int]]:
    """Return the ranges that start within ``blocks``, clipped to it."""
    pairs = zip(starts, [start + 1 for start in starts] if ends is None else ends, strict=True)
    return [(start, min(end, blocks)) for start, end in pairs if start < blocks]


def _list_ranges(config: VariableSparsityConfig | BSLongformerSparsityConfig) -> None:
    """Copy the config's ranges of global blocks to lists. ValueError: they are not ranges."""
    starts = config.global_block_indices = list(config.global_block_indices)
    if config.global_block_end_indices is None:
        return
    ends = config.global_block_end_indices = list(config.global_block_end_indices)
    if len(starts) != len(ends):
        raise ValueError(
            f"global_block_indices={starts} and global_block_end_indices={ends} must have the same length"
        )
    for start, end in zip(starts, ends, strict=True):
        if start >= end:
            raise ValueError(
                f"the global range from block {start} to {end} (exclusive) is empty: "
                "global_block_end_indices must exceed global_block_indices"
            )


def _check_attention(attention: str, horizontal: bool = False) -> None:
    if attention not in _KINDS:
        raise NotImplementedError(f"attention={attention!r} is unknown: use {' or '.join(_KINDS)}")
    if horizontal and attention != "bidirectional":
        raise ValueError(
            "horizontal_global_attention lets global blocks attend to later ones: set attention='bidirectional'"
        )


def _check_fits(name: str, wanted: int, layout: Tensor) -> None:
    if layout.shape[1] < wanted:
        raise ValueError(
            f"{name}={wanted}, but the sequence has only {layout.shape[1]} blocks: use a longer sequence, smaller "
            f"blocks or a smaller {name}"
        )
