"""Lay out parameters in buckets and shards across ranks: pure arithmetic, no torch.distributed.

A *bucket* is a run of parameters of one gather unit with the same replica group, dtype and wire dtype, laid end to
end, padded, and divided evenly among the ranks of its group: rank ``r`` owns shard ``r`` (ZeRO, Rajbhandari et al.
2020, section 5). Optimizer groups do not split buckets: the group is a property of a fragment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from deepspeed.checkpoint.shards import ShardCut

ALIGNMENT = 16
"""Every parameter and every shard starts at a multiple of this many elements (64 bytes in fp32), and of the block
size where the optimizer keeps per-block values (``UpdateTraits.grain``)."""

UNUSED = -1
"""Parameter index of a slot that is not trained (a frozen parameter in a bucket with trained ones)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """Description of one parameter for the layout; ``index`` is its position in the engine's list."""

    index: int
    name: str
    numel: int
    dtype: torch.dtype
    unit: int
    wire_dtype: torch.dtype
    replica_group: str = "dense"
    """Name of the replica group, the ranks that hold these weights (``zero/replica_groups.py``)."""
    requires_grad: bool = True
    own_bucket: bool = False
    """Gets its own bucket."""
    separate: bool = False
    """Shares no bucket with copies of whole tensors (Note: blocks and copies in `zero/partitioning.py`)."""

    @property
    def key(self) -> tuple[str, torch.dtype, torch.dtype, bool, bool]:
        """Return the key of the bucket: parameters with different keys never share one."""
        return (self.replica_group, self.dtype, self.wire_dtype, self.requires_grad, self.separate)


@dataclass(frozen=True, slots=True)
class Slot:
    """Position of one parameter inside its bucket: elements ``[offset, offset + numel)``."""

    param: int
    offset: int
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of one parameter that one rank owns, as offsets into the flat parameter and into the shard."""

    param: int
    param_offset: int
    shard_offset: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """One bucket: its slots in order, its padded length and the number of equal shards it is divided into."""

    index: int
    replica_group: str
    dtype: torch.dtype
    wire_dtype: torch.dtype
    requires_grad: bool
    slots: tuple[Slot, ...]
    padded_numel: int
    num_shards: int

    @property
    def numel(self) -> int:
        """Number of parameter elements, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def shard_numel(self) -> int:
        return self.padded_numel // self.num_shards

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the half-open interval of the bucket that ``rank`` owns: all of it on every rank if there is one
        shard."""
        shard = rank if self.num_shards > 1 else 0
        return shard * self.shard_numel, (shard + 1) * self.shard_numel

    def parts(self, slot: Slot) -> list[tuple[int, int, int]]:
        """Return ``(rank, start, stop)`` of a parameter's non-empty parts, as offsets into the flat parameter."""
        if not slot.numel:
            return []
        cut = self.cut_of(slot)
        return [(rank, *cut.interval(rank, slot.numel)) for rank in cut.shards(0, slot.numel)]

    def cut_of(self, slot: Slot) -> ShardCut:
        """Return how one parameter is divided among the shards."""
        return ShardCut(slot.offset, self.shard_numel, self.num_shards)

    def owned(self, rank: int) -> tuple[Fragment, ...]:
        """Return the non-empty fragments of parameters inside the shard of ``rank``, in order."""
        start, stop = self.shard_range(rank)
        fragments: list[Fragment] = []
        for slot in self.slots:
            low, high = max(start, slot.offset), min(stop, slot.end)
            if low < high:
                fragments.append(Fragment(slot.param, low - slot.offset, low - start, high - low))
        return tuple(fragments)

    def renumbered(self, new: Callable[[int, Slot], int], index: int | None = None) -> BucketLayout:
        """Return the layout with parameter indices ``new(position, slot)``."""
        slots = tuple(replace(slot, param=new(i, slot)) for i, slot in enumerate(self.slots))
        return replace(self, slots=slots, index=self.index if index is None else index)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the intervals of padding between slots and at the end."""
        result: list[tuple[int, int]] = []
        position = 0
        for slot in self.slots:
            if slot.offset > position:
                result.append((position, slot.offset))
            position = slot.end
        if position < self.padded_numel:
            result.append((position, self.padded_numel))
        return tuple(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPolicy:
    """Sizes that control the layout, in elements.

    ``max_numel`` ends a bucket before it grows larger (a single parameter may be larger); ``merge_numel`` joins
    consecutive small units up to that size; parameters of at most ``persist_numel`` elements get separate buckets
    (stage 3 keeps those gathered); 0 turns either off. ``grain``: parameters and shards start at multiples of it, so
    a parameter is also cut at multiples of it.
    """

    max_numel: int
    merge_numel: int = 0
    persist_numel: int = 0
    grain: int = 1


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


Item = TypeVar("Item")


def batches(items: Iterable[Item], numel_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield consecutive items with at most ``most`` elements in total, at least one item each."""
    batch: list[Item] = []
    size = 0
    for item in items:
        if batch and size + numel_of(item) > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += numel_of(item)
    if batch:
        yield batch


def cut(
    params: Sequence[ParamSpec], policy: CutPolicy, num_shards: int | Mapping[str, int]
) -> tuple[BucketLayout, ...]:
    """Lay out ``params`` (in the order given) in buckets and divide each into ``num_shards`` equal shards: a number, or
    one per replica group.

    The result depends on the arguments alone, so every rank computes the same layout without communication.
    """
    buckets: list[BucketLayout] = []
    for run in _runs(params, policy):
        shards = num_shards if isinstance(num_shards, int) else num_shards[run[0].replica_group]
        if shards < 1:
            raise ValueError(f"num_shards must be at least 1, not {shards}")
        buckets.append(_lay(run, len(buckets), shards, math.lcm(ALIGNMENT, policy.grain)))
    return tuple(buckets)


def _runs(params: Iterable[ParamSpec], policy: CutPolicy) -> list[list[ParamSpec]]:
    """Group parameters into runs: open ones are keyed by (persistent, key) and closed by unit and size."""
    runs: list[list[ParamSpec]] = []
    open_runs: dict[tuple[bool, object], list[ParamSpec]] = {}
    sizes: dict[tuple[bool, object], int] = {}
    for spec in params:
        persistent = 0 < spec.numel <= policy.persist_numel
        key = (persistent, spec.key)
        run = open_runs.get(key)
        if run is None or not _fits(run[-1], sizes[key], spec, policy, persistent):
            run = open_runs[key] = []
            sizes[key] = 0
            runs.append(run)
        run.append(spec)
        sizes[key] += spec.numel
    return runs


def _fits(last: ParamSpec, size: int, spec: ParamSpec, policy: CutPolicy, persistent: bool) -> bool:
    """Tell whether ``spec`` belongs to the run that ends with ``last`` and has ``size`` elements."""
    if spec.own_bucket or last.own_bucket:
        return False
    if size + spec.numel > policy.max_numel:
        return False
    return persistent or last.unit == spec.unit or size < policy.merge_numel


def _lay(run: list[ParamSpec], index: int, num_shards: int, alignment: int) -> BucketLayout:
    slots: list[Slot] = []
    position = 0
    for spec in run:
        position = round_up(position, alignment)
        slots.append(Slot(spec.index, position, spec.numel))
        position += spec.numel
    first = run[0]
    return BucketLayout(
        index=index,
        replica_group=first.replica_group,
        dtype=first.dtype,
        wire_dtype=first.wire_dtype,
        requires_grad=first.requires_grad,
        slots=tuple(slots),
        padded_numel=round_up(position, alignment * num_shards),
        num_shards=num_shards,
    )
