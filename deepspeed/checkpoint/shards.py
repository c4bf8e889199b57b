"""Shard indices, and their intersection: how the shards of one layout map onto those of another.

A shard is described by names and numbers alone: the parameter's name, its global shape, the boxes of the global
tensor that make up the local (tensor-parallel) tensor, and the flat interval ``[start, stop)`` inside that local
tensor. This covers ZeRO (an interval of the whole tensor), tensor parallelism (one box, or several where matrices are
fused, such as q, k and v), and expert and pipeline parallelism (a name and a box). Loading is intersection: every
layout reads every other one without conversion.

Pure arithmetic: no torch, no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Interval = tuple[int, int]
Box = tuple[Interval, ...]
"""One half-open interval ``(low, high)`` per dim."""


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The interval of a tensor that a saved or live 1-D fragment holds.

    ``boxes`` are in the global tensor; ``()`` means all of it. The local tensor is their
    concatenation, in the order given, along the one dim in which they differ. ``start`` and ``stop`` count
    elements of the local tensor in row-major order.
    """

    name: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    start: int
    stop: int

    def __post_init__(self) -> None:
        for box in self.boxes:
            if len(box) != len(self.global_shape) or any(
                not 0 <= low <= high <= size for (low, high), size in zip(box, self.global_shape, strict=True)
            ):
                raise ValueError(
                    f"{self.name}: box {box} is not inside a tensor of shape {self.global_shape}"
                )
        if not 0 <= self.start <= self.stop <= self.local_numel:
            raise ValueError(
                f"{self.name}: [{self.start}, {self.stop}) is not inside a local tensor of {self.local_numel} "
                "elements"
            )

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the boxes form."""
        if not self.boxes:
            return self.global_shape
        dim = _joined_dim(self.boxes, self.name)
        shape = [high - low for low, high in self.boxes[0]]
        if dim is not None:
            shape[dim] = sum(box[dim][1] - box[dim][0] for box in self.boxes)
        return tuple(shape)

    @property
    def local_numel(self) -> int:
        return prod(self.local_shape)

    def whole(self) -> ShardIndex:
        """Return the index of the whole local tensor."""
        return ShardIndex(self.name, self.global_shape, self.boxes, 0, self.local_numel)


@dataclass(frozen=True, slots=True)
class ShardCut:
    """Cut of a tensor inside an evenly sharded flat buffer: the tensor starts at ``offset`` in the buffer, whose
    shard ``s`` of ``count`` holds elements ``[s * length, (s + 1) * length)``."""

    offset: int
    length: int
    count: int

    def interval(self, shard: int, numel: int) -> Interval:
        """Return the interval ``[start, stop)`` of a tensor of ``numel`` elements that a shard holds; ``(0, 0)`` if
        empty."""
        start = max(0, shard * self.length - self.offset)
        stop = min(numel, (shard + 1) * self.length - self.offset)
        return (start, stop) if start < stop and shard < self.count else (0, 0)

    def shards(self, start: int, stop: int) -> range:
        """Return the numbers of the shards that hold the non-empty interval ``[start, stop)`` of the tensor."""
        return range((self.offset + start) // self.length, (self.offset + stop - 1) // self.length + 1)


@dataclass(frozen=True, slots=True)
class Region:
    """A box of the global tensor and the location of its elements in a flat fragment.

    The element at the low corner is at ``offset``; one step along dim ``d`` moves by ``strides[d]`` elements.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]

    def at(self, box: Box) -> int:
        """Return the offset in the fragment of the low corner of ``box``, which is inside this region."""
        steps = (low - own for (low, _), (own, _) in zip(box, self.box, strict=True))
        return self.offset + sum(step * stride for step, stride in zip(steps, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """One strided copy: ``shape`` elements of source number ``source`` into the target fragment."""

    source: int
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Return whether source and target are both contiguous."""
        return self.source_strides == self.target_strides == (1,)


def intersect(target: ShardIndex, sources: Sequence[ShardIndex]) -> tuple[list[StridedCopy], list[Box]]:
    """Return the copies that fill ``target`` from ``sources``, and the boxes that no source holds.

    Each element of the target is copied at most once, from the first source that has it. Missing boxes are in global
    coordinates, or local ones (a single interval) if all sources have the target's boxes.
    """
    for source in sources:
        if source.global_shape != target.global_shape:
            raise ValueError(
                f"{target.name}: saved with shape {source.global_shape}, but the model has {target.global_shape}"
            )
    flat = all(source.boxes == target.boxes for source in sources)
    copies: list[StridedCopy] = []
    missing: list[Box] = []
    source_regions: list[list[Region]] = [[_interval(s)] if flat else regions(s) for s in sources]
    for region in [_interval(target)] if flat else regions(target):
        left = [region.box] if not _is_empty(region.box) else []
        for number, candidates in enumerate(source_regions):
            if not left:
                break
            for candidate in candidates:
                left, found = _take(left, candidate.box)
                copies += [_strided_copy(number, candidate, region, box) for box in found]
        missing += left
    return copies, missing


def span(shard: ShardIndex) -> ShardIndex:
    """Return the shortest interval of the flat global tensor that contains ``shard``."""
    if not shard.boxes:
        return shard
    if not shard.numel:
        return ShardIndex(shard.name, shard.global_shape, (), 0, 0)
    strides = _row_major(shard.global_shape)
    boxes = [region.box for region in regions(shard)]
    low = min(sum(a * s for (a, _), s in zip(box, strides, strict=True)) for box in boxes)
    last = max(sum((b - 1) * s for (_, b), s in zip(box, strides, strict=True)) for box in boxes)
    return ShardIndex(shard.name, shard.global_shape, (), low, last + 1)


def covers(target: ShardIndex, sources: Sequence[ShardIndex]) -> bool:
    """Return whether ``sources`` hold all of ``target``; sources of another global shape are ignored."""
    fitting = [source for source in sources if source.global_shape == target.global_shape]
    return bool(fitting) and not intersect(target, fitting)[1]


def regions(shard: ShardIndex) -> list[Region]:
    """Return the boxes of the global tensor that ``shard`` holds, at most ``2 * ndim - 1`` per box of the local
    tensor."""
    shape = shard.local_shape
    strides = _row_major(shape)
    found: list[Region] = []
    for placed, shift in _placements(shard):
        for slab in slabs(shape, shard.start, shard.stop):
            local = _overlap(slab, placed)
            if local is None:
                continue
            offset = sum(low * stride for (low, _), stride in zip(local, strides, strict=True)) - shard.start
            box = tuple((low + move, high + move) for (low, high), move in zip(local, shift, strict=True))
            found.append(Region(box, offset, strides))
    return found


def without(found: Sequence[Region], holes: Sequence[Box]) -> list[Region]:
    """Return the regions minus the boxes in ``holes``."""
    left: list[Region] = []
    for region in found:
        boxes = [region.box]
        for hole in holes:
            boxes, _ = _take(boxes, hole)
        left += [Region(box, region.at(box), region.strides) for box in boxes if not _is_empty(box)]
    return left


def slabs(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Split the flat interval ``[start, stop)`` of a row-major tensor into boxes, in order."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start, stop),) if shape else ()]
    inner, rest = prod(shape[1:]), shape[1:]
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return [((first, first + 1), *box) for box in slabs(rest, head, tail)]
    found: list[Box] = []
    if head:
        found += [((first, first + 1), *box) for box in slabs(rest, head, inner)]
        first += 1
    if first < last:
        found.append(((first, last), *((0, size) for size in rest)))
    if tail:
        found += [((last, last + 1), *box) for box in slabs(rest, 0, tail)]
    return found


def _placements(shard: ShardIndex) -> list[tuple[Box, tuple[int, ...]]]:
    """Return each box in local coordinates, and its offset from local to global coordinates."""
    if not shard.boxes:
        return [(tuple((0, size) for size in shard.global_shape), (0,) * len(shard.global_shape))]
    dim = _joined_dim(shard.boxes, shard.name)
    found: list[tuple[Box, tuple[int, ...]]] = []
    position = 0
    for box in shard.boxes:
        local = [(0, high - low) for low, high in box]
        if dim is not None:
            extent = box[dim][1] - box[dim][0]
            local[dim] = (position, position + extent)
            position += extent
        shift = tuple(low - own for (low, _), (own, _) in zip(box, local, strict=True))
        found.append((tuple(local), shift))
    return found


def _joined_dim(boxes: tuple[Box, ...], name: str) -> int | None:
    """Return the dim along which several boxes are concatenated; None for a single box."""
    if len(boxes) == 1:
        return None
    differing = [dim for dim in range(len(boxes[0])) if len({box[dim] for box in boxes}) > 1]
    if len(differing) != 1:
        raise ValueError(f"{name}: the boxes {boxes} of one local tensor must differ in exactly one dim")
    return differing[0]


def _interval(shard: ShardIndex) -> Region:
    return Region(((shard.start, shard.stop),), 0, (1,))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _is_empty(box: Box) -> bool:
    return any(low >= high for low, high in box)


def _overlap(one: Box, other: Box) -> Box | None:
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if _is_empty(box) else box


def _take(left: list[Box], wanted: Box) -> tuple[list[Box], list[Box]]:
    """Split the disjoint boxes ``left`` into parts outside and parts inside ``wanted``."""
    remaining: list[Box] = []
    taken: list[Box] = []
    for box in left:
        common = _overlap(box, wanted)
        if common is None:
            remaining.append(box)
        else:
            taken.append(common)
            remaining += _without(box, common)
    return remaining, taken


def _without(box: Box, hole: Box) -> list[Box]:
    """Return ``box`` minus ``hole``, which is inside it, as disjoint boxes."""
    found: list[Box] = []
    core = list(box)
    for dim, ((low, high), (hole_low, hole_high)) in enumerate(zip(box, hole, strict=True)):
        for side in ((low, hole_low), (hole_high, high)):
            if side[0] < side[1]:
                found.append((*core[:dim], side, *core[dim + 1 :]))
        core[dim] = (hole_low, hole_high)
    return found


def _strided_copy(number: int, source: Region, target: Region, box: Box) -> StridedCopy:
    return StridedCopy(
        source=number,
        shape=tuple(high - low for low, high in box),
        source_offset=source.at(box),
        source_strides=source.strides,
        target_offset=target.at(box),
        target_strides=target.strides,
    )
