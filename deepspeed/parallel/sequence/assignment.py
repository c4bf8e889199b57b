"""Assignment of attention heads and sequence parts to ranks: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from deepspeed.parallel.tensor.cuts import even_sizes


@dataclass(frozen=True)
class HeadAssignment:
    """Division of ``ranks`` into ``head_groups`` groups of ``width`` consecutive ranks. The ranks of a group split the
    heads and see the group's part of the sequence; groups pass keys and values on in a ring. With at least as many
    heads as ranks there is one group, and each rank sees the whole sequence.
    """

    heads: int
    kv_heads: int
    ranks: int

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.ranks) < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads are not a multiple of {self.kv_heads} key-value heads"
            )

    @cached_property
    def width(self) -> int:
        """Size of a group: the largest divisor of ``ranks`` that is at most ``heads``."""
        return max(n for n in range(1, min(self.heads, self.ranks) + 1) if self.ranks % n == 0)

    @property
    def head_groups(self) -> int:
        return self.ranks // self.width

    def head_group(self, rank: int) -> int:
        return rank // self.width

    def queries_of(self, rank: int) -> tuple[int, ...]:
        """Return the run of query heads of a rank; run lengths differ by at most one."""
        sizes, place = even_sizes(self.heads, self.width), rank % self.width
        return tuple(range(sum(sizes[:place]), sum(sizes[: place + 1])))

    def keys_of(self, rank: int) -> tuple[int, ...]:
        """Return the key/value heads that this rank's query heads use. Several ranks may use the same ones."""
        group = self.heads // self.kv_heads
        return tuple(sorted({head // group for head in self.queries_of(rank)}))

    def queries(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the query heads that ``rank`` sends to each rank: none outside its group."""
        return tuple(self.queries_of(to) if self._in_one_group(rank, to) else () for to in range(self.ranks))

    def keys(self, rank: int) -> tuple[tuple[int, ...], ...]:
        return tuple(self.keys_of(to) if self._in_one_group(rank, to) else () for to in range(self.ranks))

    def lengths(self, rank: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shard lengths of the ranks in this rank's group; 0 for others."""
        return tuple(n if self._in_one_group(rank, other) else 0 for other, n in enumerate(lengths))

    def parts(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the length of each group's part of the sequence."""
        width = self.width
        return tuple(sum(lengths[at : at + width]) for at in range(0, self.ranks, width))

    def key_of_query(self, rank: int) -> tuple[int, ...]:
        """Return, for each query head of this rank, the index of its key head among those that the rank has."""
        group, keys = self.heads // self.kv_heads, self.keys_of(rank)
        return tuple(keys.index(head // group) for head in self.queries_of(rank))

    def group_of(self, rank: int) -> int | None:
        """Return the number of this rank's query heads per key head; None if it is not uniform."""
        positions, count = self.key_of_query(rank), len(self.keys_of(rank))
        size = len(positions) // count
        regular = tuple(at for at in range(count) for _ in range(size))
        return size if positions == regular else None

    def _in_one_group(self, one: int, other: int) -> bool:
        return self.head_group(one) == self.head_group(other)


def shard_lengths(length: int, ranks: int) -> tuple[int, ...]:
    """Return the lengths of ``ranks`` contiguous shards of a sequence, which differ by at most one, longer ones first.

    ValueError: there are fewer tokens than ranks.
    """
    if length < ranks:
        raise ValueError(
            f"a sequence of {length} tokens cannot be sharded over {ranks} ranks: each needs at least one; pad it, or "
            "use a smaller sequence_parallel_size"
        )
    return even_sizes(length, ranks)
