"""Batches by token count: sequences fill packs, and a fixed number of packs is one global batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepspeed.base.logging import logger
from deepspeed.data.data_sampling.shuffling import Shuffle

ORDERS = ("dataloader", "random", "seqlen")
WEIGHTINGS = ("samples", "tokens", "predictions", "none")
_ROWS = 64
"""First guess of the sequences per pack, if all packs of a batch have equally many."""


@dataclass(frozen=True)
class TokenBatches(Sequence[tuple[int, list[int]]]):
    """The packs of all batches in order: item p is (index of its batch, numbers of its sequences).

    Stored as arrays: as lists, a data set of ten million sequences would take a gigabyte per rank.
    """

    numbers: np.ndarray
    """Sequence numbers of all packs, concatenated."""
    lengths: np.ndarray
    """Tokens of each sequence in ``numbers``."""
    ends: np.ndarray
    """End of each pack in ``numbers``; the number of packs is a multiple of ``per_batch``."""
    per_batch: int

    def __len__(self) -> int:
        return len(self.ends)

    def _bounds(self, pack: int) -> tuple[int, int]:
        return int(self.ends[pack - 1]) if pack else 0, int(self.ends[pack])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[pack] for pack in range(*index.indices(len(self)))]
        pack = index + len(self) if index < 0 else index
        if not 0 <= pack < len(self):
            raise IndexError(f"pack index {index} is out of range for {len(self)} packs")
        start, end = self._bounds(pack)
        return pack // self.per_batch, self.numbers[start:end].tolist()

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return (self[pack] for pack in range(len(self)))

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sums of per-sequence values over each pack, int64 [packs]."""
        total = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
        return np.diff(total[np.concatenate(([0], self.ends))])

    def units(self, weighting: str) -> np.ndarray:
        """Return the weight of each pack: its sequences, its tokens, or its tokens without the first of each
        sequence."""
        if weighting == "tokens":
            return self._sums(self.lengths)
        if weighting == "predictions":
            return self._sums(np.maximum(self.lengths - 1, 0))
        return self._sums(np.ones(len(self.numbers), np.int64))

    @property
    def batch_sizes(self) -> list[int]:
        """Sequences of each batch."""
        return self.units("samples").reshape(-1, self.per_batch).sum(1).tolist()

    @property
    def longest(self) -> list[int]:
        """Tokens of the longest sequence of each batch."""
        ends = self.ends[self.per_batch - 1 :: self.per_batch]
        starts = np.concatenate(([0], ends[:-1])).astype(np.int64)
        return np.maximum.reduceat(self.lengths, starts).tolist() if len(ends) else []


def pack(
    lengths: Any,
    max_tokens: int,
    *,
    numbers: Any = None,
    smallest: int = 1,
    largest: int | None = None,
    order: str = "dataloader",
    per_batch: int = 1,
    equal: bool = False,
    seed: int = 0,
) -> TokenBatches:
    """Fill packs of at most ``max_tokens`` tokens, in order.

    Args:
        lengths: tokens of each sequence.
        numbers: number of each sequence in the packs; None: its index in ``lengths``.
        smallest, largest: limits on sequences per pack; a pack that is full with fewer than ``smallest`` is dropped.
        order: dataloader (as given), seqlen (short ones first), or random.
        per_batch: packs of a batch; packs that do not fill a last batch are dropped.
        equal: all packs of a batch have the same number of sequences, assigned round-robin.

    Sequences longer than ``max_tokens`` are dropped too; the log counts dropped sequences.

    Raises:
        ValueError: a number is not positive, an order is unknown, or there are not as many numbers as lengths.
    """
    lengths = np.asarray(lengths, dtype=np.int64).reshape(-1)
    numbers = np.arange(len(lengths)) if numbers is None else np.asarray(numbers, dtype=np.int64).reshape(-1)
    _check(lengths, numbers, max_tokens, smallest, largest, order, per_batch)
    places = np.flatnonzero(lengths <= max_tokens)
    if len(places) < len(lengths):
        logger.warning(
            f"{len(lengths) - len(places)} of {len(lengths)} sequences are longer than "
            f"max_tokens={max_tokens} and are skipped: raise max_tokens, or truncate them"
        )
    if order == "seqlen":
        places = places[np.argsort(lengths[places], kind="stable")]
    elif order == "random":
        places = places[Shuffle(len(places), seed)(np.arange(len(places)))]
    lengths, numbers = lengths[places], numbers[places]
    fill = _equal_packs if equal else _full_packs
    sizes, taken = fill(lengths, max_tokens, smallest, largest, per_batch)
    kept = len(sizes) - len(sizes) % per_batch
    sizes = np.asarray(sizes[:kept], dtype=np.int64)
    chosen = taken[: int(sizes.sum())]
    if len(chosen) < len(numbers):
        logger.info(
            f"{len(numbers) - len(chosen)} of {len(numbers)} sequences do not fill a batch and are skipped"
        )
    return TokenBatches(numbers[chosen], lengths[chosen], np.cumsum(sizes), per_batch)


def _check(
    lengths: np.ndarray,
    numbers: np.ndarray,
    max_tokens: int,
    smallest: int,
    largest: int | None,
    order: str,
    per_batch: int,
) -> None:
    if len(numbers) != len(lengths):
        raise ValueError(f"got {len(lengths)} lengths for {len(numbers)} sequences")
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"sequence {int(numbers[lengths.argmin()])} has length {int(lengths.min())}")
    for name, value in (("max_tokens", max_tokens), ("effective_batch_size", per_batch)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if largest is not None and largest < max(1, smallest):
        raise ValueError(
            f"max_batch_size={largest} must be at least min_batch_size={smallest}, and at least 1"
        )
    if order not in ORDERS:
        raise ValueError(f"sequence_picking_order={order!r} is not one of {', '.join(ORDERS)}")


def _full_packs(
    lengths: np.ndarray, max_tokens: int, smallest: int, largest: int | None, per_batch: int
) -> tuple[list[int], np.ndarray]:
    """Fill each pack as far as possible; return pack sizes, and the indices of packed sequences."""
    total = np.cumsum(lengths)
    sizes: list[int] = []
    taken = np.ones(len(lengths), bool)
    start = before = 0
    while start < len(lengths):
        end = int(np.searchsorted(total, before + max_tokens, side="right"))
        if largest is not None:
            end = min(end, start + largest)
        if end - start >= smallest:
            sizes.append(end - start)
        else:
            taken[start:end] = False
        start, before = end, int(total[end - 1])
    return sizes, np.flatnonzero(taken)


def _equal_packs(
    lengths: np.ndarray, max_tokens: int, smallest: int, largest: int | None, per_batch: int
) -> tuple[list[int], np.ndarray]:
    """Return pack sizes and indices with ``per_batch`` packs of equal size at a time: sequence i of a batch is in
    pack i % per_batch."""
    sizes: list[int] = []
    taken = [np.empty(0, np.int64)]
    start = 0
    while (left := (len(lengths) - start) // per_batch) > 0:
        rows = _rows_that_fit(lengths[start:], max_tokens, min(left, largest or left), per_batch)
        if rows >= smallest:
            sizes += [rows] * per_batch
            taken.append(np.arange(start, start + rows * per_batch).reshape(rows, per_batch).T.reshape(-1))
        start += rows * per_batch
    return sizes, np.concatenate(taken)


def _rows_that_fit(lengths: np.ndarray, max_tokens: int, most: int, columns: int) -> int:
    """Return the number of rows of ``columns`` sequences that fit before a column is full; at least 1."""
    tried = min(_ROWS, most)
    while True:
        sums = lengths[: tried * columns].reshape(tried, columns).cumsum(0)
        fits = (sums <= max_tokens).all(1)
        if not fits.all():
            return int(fits.argmin())
        if tried == most:
            return most
        tried = min(2 * tried, most)


def scale_lr(
    base_batch_size: int, batch_size: int, base_lr: float = 1, method: str | None = "linear"
) -> float:
    """Scale ``base_lr`` from batches of ``base_batch_size`` to batches of ``batch_size``.

    linear: proportional (Goyal et al. 2017); sqrt: by the square root (Krizhevsky 2014); none or None: unchanged.
    ValueError: unknown method.
    """
    known = "none" if method is None else str(method).lower()
    if known == "linear":
        return base_lr * batch_size / base_batch_size
    if known == "sqrt":
        return base_lr * math.sqrt(batch_size / base_batch_size)
    if known == "none":
        return base_lr
    raise ValueError(f"lr_scaling_method={method!r} is not one of linear, sqrt, none")
