"""Shuffled orders without memory: a permutation of any size as a function of seed and position."""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 6


class Shuffle:
    """A permutation of 0 to n - 1 that depends on ``seed`` alone.

    A Feistel network over the next power of four, with cycle walking for values >= n (Black and Rogaway 2002): any
    part of the order can be computed without the rest.
    """

    def __init__(self, n: int, *seed: int) -> None:
        self.n = n
        self._half = np.uint64(max(1, -(-max(n - 1, 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        digest = hashlib.blake2b(repr((n, *seed)).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the entries of the permutation at ``positions`` [k], int64."""
        found = np.array(positions, dtype=np.uint64)
        todo = np.arange(len(found))
        while len(todo):
            found[todo] = self._mixed(found[todo])
            todo = todo[found[todo] >= self.n]
        return found.astype(np.int64)

    def _mixed(self, value: np.ndarray) -> np.ndarray:
        left, right = value >> self._half, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_scrambled(right + key) & self._mask)
        return (left << self._half) | right


def _scrambled(value: np.ndarray) -> np.ndarray:
    """Return the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class ShuffledPasses:
    """Endless passes over 0 to n - 1, each in a different order; readable from any position."""

    _BLOCK = 4096

    def __init__(self, n: int, *seed: int) -> None:
        self.n, self._seed = n, seed
        self._at: tuple[int, int] | None = None
        self._block = np.empty(0, np.int64)

    def take(self, position: int, count: int) -> np.ndarray:
        """Return ``count`` entries from ``position`` on, int64 [count]."""
        found: list[np.ndarray] = []
        while count:
            turn, place = divmod(position, self.n)
            number, start = divmod(place, self._BLOCK)
            if self._at != (turn, number):  # computed per block: a batch takes few entries
                first = number * self._BLOCK
                order = Shuffle(self.n, *self._seed, turn)
                self._at, self._block = (
                    (turn, number),
                    order(np.arange(first, min(first + self._BLOCK, self.n))),
                )
            part = self._block[start : start + count]
            found.append(part)
            position, count = position + len(part), count - len(part)
        if len(found) == 1:  # the common case: a batch takes a few entries per cluster
            return found[0]
        return np.concatenate(found) if found else np.empty(0, np.int64)
