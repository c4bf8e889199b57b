"""Division of one tensor over the ranks that share a layer.

Pure arithmetic, except ``take`` and ``joined``, which slice tensors. One description serves a layer's weights, its
outputs and its ``Placement``: the intervals of the whole dim that each rank holds, in local order. Fused projections,
gated units in any order, head groups and replicated heads are thus all the same case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.checkpoint.placement import Placement
from deepspeed.checkpoint.shards import Box, Interval

AXIS = "tp"


def even_sizes(size: int, ranks: int, grain: int = 1) -> tuple[int, ...]:
    """Divide ``size`` over ``ranks`` as evenly as units of ``grain`` allow, larger extents first.

    ValueError: ``grain`` does not divide ``size``.
    """
    if grain < 1 or size % grain:
        raise ValueError(f"{size} is not a multiple of {grain}")
    each, rest = divmod(size // grain, ranks)
    return tuple((each + (rank < rest)) * grain for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut of one tensor along ``dim``. ``parts[rank]``: the half-open intervals of ``[0, size)`` that a rank holds, in
    the order of its local tensor. Elements may be held by several ranks, and are held by at least one.
    """

    dim: int
    size: int
    parts: tuple[tuple[Interval, ...], ...]

    def __post_init__(self) -> None:
        position = 0
        for low, high in _sorted(part for rank in self.parts for part in rank):
            if not 0 <= low <= high <= self.size:
                raise ValueError(f"the interval [{low}, {high}) is not inside a dim of {self.size}")
            if low > position:
                raise ValueError(f"no rank holds [{position}, {low}) of a dim of {self.size}")
            position = max(position, high)
        if position != self.size:
            raise ValueError(f"no rank holds [{position}, {self.size}) of a dim of {self.size}")
        for rank in self.parts:
            ordered = _sorted(rank)
            if any(one[1] > other[0] for one, other in zip(ordered, ordered[1:], strict=False)):
                raise ValueError(f"a rank holds an element twice: {rank}")

    @classmethod
    def even(cls, dim: int, size: int, ranks: int, *, grain: int = 1, blocks: int = 1) -> Cut:
        """Cut as evenly as units of ``grain`` allow. ``blocks``: the tensor is that many equal matrices side by side,
        each of which is cut (the two of a gated unit)."""
        if size % blocks:
            raise ValueError(f"{size} is not {blocks} equal blocks")
        return cls.fused(dim, [even_sizes(size // blocks, ranks, grain)] * blocks)

    @classmethod
    def fused(cls, dim: int, blocks: Sequence[Sequence[int]]) -> Cut:
        """Cut several matrices side by side; ``blocks[i][rank]`` is a rank's extent of the i-th."""
        parts: list[list[Interval]] = [[] for _ in blocks[0]]
        position = 0
        for sizes in blocks:
            for rank, extent in enumerate(sizes):
                if extent:
                    parts[rank].append((position, position + extent))
                position += extent
        return cls(dim, position, tuple(tuple(rank) for rank in parts))

    @classmethod
    def whole(cls, dim: int, size: int, ranks: int) -> Cut:
        """Return the cut under which every rank holds everything."""
        return cls(dim, size, (((0, size),),) * ranks)

    @property
    def ranks(self) -> int:
        return len(self.parts)

    @property
    def extents(self) -> tuple[int, ...]:
        """Local extent on each rank."""
        return tuple(sum(high - low for low, high in rank) for rank in self.parts)

    @property
    def is_plain(self) -> bool:
        """Return whether the ranks hold consecutive runs, in rank order, without overlap."""
        position = 0
        for low, high in (part for rank in self.parts for part in rank):
            if low != position:
                return False
            position = high
        return position == self.size

    def along(self, dim: int) -> Cut:
        """Return the same cut along another dim (bias and weight, output and weight)."""
        return Cut(dim, self.size, self.parts)

    def shared(self) -> tuple[Interval, ...]:
        """Return the intervals that more than one rank holds, ascending."""
        again = [part for rank in range(self.ranks) for part in self.elsewhere(rank)]
        return _overlaps(again, [(0, self.size)])

    def elsewhere(self, rank: int) -> tuple[Interval, ...]:
        """Return the intervals that ``rank`` shares with an earlier rank, which counts those elements."""
        earlier = [part for each in self.parts[:rank] for part in each]
        return _overlaps(self.parts[rank], earlier)

    def local(self, rank: int, intervals: Sequence[Interval]) -> tuple[tuple[Interval, Interval], ...]:
        """Return the parts of ``intervals`` in the rank's local tensor, as pairs of (local interval, global
        interval).
        """
        found: list[tuple[Interval, Interval]] = []
        position = 0
        for low, high in self.parts[rank]:
            for a, b in _overlaps([(low, high)], intervals):
                found.append(((position + a - low, position + b - low), (a, b)))
            position += high - low
        return tuple(found)

    def take(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the rank's part of a whole ``tensor``: a view if it is one interval, else a copy."""
        if tensor.shape[self.dim] != self.size:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is not {self.size} wide in dim {self.dim}"
            )
        pieces = [tensor.narrow(self.dim, low, high - low) for low, high in self.parts[rank]]
        if not pieces:
            return tensor.narrow(self.dim, 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Assemble the whole tensor from every rank's part."""
        if self.is_plain:
            return torch.cat(list(tensors), self.dim)
        shape = list(tensors[0].shape)
        shape[self.dim] = self.size
        whole = tensors[0].new_empty(shape)
        for rank in reversed(range(self.ranks)):  # the first holder's values win
            position = 0
            for low, high in self.parts[rank]:
                piece = tensors[rank].narrow(self.dim, position, high - low)
                whole.narrow(self.dim, low, high - low).copy_(piece)
                position += high - low
        return whole

    def placement(self, shape: Sequence[int], rank: int) -> Placement:
        """Return the placement of the rank's part of a tensor whose whole shape is ``shape``."""
        shape = tuple(shape)
        dim = self.dim % len(shape)
        if shape[dim] != self.size:
            raise ValueError(f"a tensor of shape {shape} is not {self.size} wide in dim {dim}")
        if all(part == ((0, self.size),) for part in self.parts):
            return replicated(shape, rank)

        def box(part: Interval) -> Box:
            return tuple(part if d == dim else (0, size) for d, size in enumerate(shape))

        boxes = tuple(box(part) for part in self.parts[rank]) or (box((0, 0)),)
        elsewhere = tuple(box(part) for part in self.elsewhere(rank))
        return Placement(global_shape=shape, boxes=boxes, split=(AXIS,), elsewhere=elsewhere)


def replicated(shape: Sequence[int], rank: int) -> Placement:
    """Return the placement of a tensor that every tensor-parallel rank holds whole."""
    return Placement(global_shape=tuple(shape), replicated=(AXIS,), counts=rank == 0)


def _sorted(intervals: Iterable[Interval]) -> list[Interval]:
    return sorted(part for part in intervals if part[0] < part[1])


def _overlaps(own: Sequence[Interval], others: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return the parts of ``own`` that are in ``others``, ascending and disjoint."""
    found: list[Interval] = []
    for low, high in sorted(
        (max(a, c), min(b, d)) for a, b in own for c, d in others if max(a, c) < min(b, d)
    ):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)
