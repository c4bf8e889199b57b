"""Host memory and swap files of offloaded masters and optimizer state (``zero/offload/tiers.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.config.plan import ZenFlowPlan
from deepspeed.planning.ledger import (
    FROM_READY,
    STEADY,
    TRAINING,
    Ledger,
    MemoryKind,
    MemoryPhase,
    MemoryPlace,
)
from deepspeed.planning.optimizer_states import StateSize
from deepspeed.planning.setting import BucketUse, RankSetting
from deepspeed.zero.layout import BucketLayout, Fragment, round_up
from deepspeed.zero.offload import swap_file
from deepspeed.zero.offload.tiers import ALIGN, OffloadedTier, make_tier
from deepspeed.zero.states.fragments import sub_groups
from deepspeed.zero.states.store import ResidentTier


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFragment:
    """Sizes and places of a future ``OwnedFragment``, without tensors."""

    fragment: Fragment
    separate: bool
    """Whether the master is separate from the weights."""
    storage: Any
    """Key of the buffer that holds the master; ``start``: its first element there."""
    start: int
    master_size: int
    """Bytes per element of the master; ``low_size``: of the weights."""
    low_size: int
    staged: bool
    """Whether updated weights pass through the staging slot."""
    state: StateSize

    @property
    def param_index(self) -> int:
        return self.fragment.param

    @property
    def numel(self) -> int:
        return self.fragment.numel


class CountedMemory:
    """Counts host allocations and swap files instead of making them."""

    def __init__(self, device_type: str) -> None:
        self.pins = device_type == "cuda"
        self._used: Counter[str] = Counter()
        self._grown: Counter[str] = Counter()

    def host(
        self, ledger: Ledger, phases: Iterable[MemoryPhase], kind: MemoryKind, nbytes: int, *, pin: bool
    ) -> None:
        """Count one allocation. torch rounds pinned memory up to a power of two."""
        phases = tuple(phases)
        ledger.add(phases, MemoryPlace.HOST, kind, nbytes)
        if pin and self.pins and nbytes:
            ledger.add(
                phases, MemoryPlace.HOST, MemoryKind.PINNING, (1 << (nbytes - 1).bit_length()) - nbytes
            )

    def file(self, name: str, nbytes: int) -> None:
        """Count one tensor in a file (``SwapFile.new``), which grows in steps of at least ``GROW_BYTES``."""
        self._used[name] += round_up(max(1, nbytes), swap_file.PAGE)
        if self._used[name] > self._grown[name]:
            self._grown[name] += max(self._used[name] - self._grown[name], swap_file.GROW_BYTES)

    def grown(self, name: str) -> int:
        """Return the bytes of the file on disk."""
        return self._grown[name]


class Offload:
    """Adds masters and state of the trained buckets to ``ledger``, placed as ``StateStore`` and its tier place them."""

    def __init__(self, ledger: Ledger, setting: RankSetting) -> None:
        self.ledger = ledger
        self.memory = CountedMemory(setting.device_type)
        self.plan, self.optimizer = setting.plan, setting.optimizer
        self.has_device_memory = setting.has_device_memory
        self.tier = ResidentTier()
        self.storing = 0
        """Host bytes of the buffer through which masters are written to storage."""

    def offloads(self, layout: BucketLayout) -> bool:
        return self.tier.offloads(layout)

    def files_gradients(self, layout: BucketLayout) -> bool:
        """Tell whether the bucket's summed gradient shard is stored in the file (``OffloadedTier.new_gradients``); at
        stage 1 it is part of the whole gradient."""
        swaps = self._swaps and not self.has_device_memory
        return swaps and self.plan.zero.shard_grads and self.offloads(layout)

    def gradient_bytes(self, layout: BucketLayout) -> int:
        """Return the bytes of the bucket's summed gradient shard."""
        return layout.shard_numel * (self.plan.precision.accumulate or layout.dtype).itemsize

    def place_states(self, buckets: Sequence[BucketUse], group_of: Sequence[int]) -> None:
        self.tier = self._tier([bucket.layout for bucket in buckets])
        taken = [self._own(bucket, group_of) for bucket in buckets]
        summed = [
            self.gradient_bytes(bucket.layout) for bucket in buckets if self.files_gradients(bucket.layout)
        ]
        self._pass_through_slots([owned for part in taken for owned in part], summed)

    @property
    def _swaps(self) -> bool:
        return self.plan.state_offload is not None and self.plan.state_offload.folder is not None

    def _tier(self, layouts: Sequence[BucketLayout]) -> ResidentTier:
        """Choose the tier with the run's own code, without opening a file."""
        memory: Any = self.memory
        return make_tier(
            self.plan.state_offload,
            torch.device("meta" if self.has_device_memory else "cpu"),
            layouts,
            weights_swap=None,
            elementwise=self.optimizer.elementwise,
            grain=self.optimizer.grain,
            open_swap=lambda *_: memory,
        )

    def _own(self, bucket: BucketUse, group_of: Sequence[int]) -> list[SimulatedFragment]:
        """Count a bucket's masters and its resident state; return the fragments that an offloaded tier updates."""
        layout, tier = bucket.layout, self.tier.of(bucket.layout)
        fragments = [f for f in layout.owned(0) if f.param < len(group_of)]
        taken = tier.offloads(layout)
        dtype = self.plan.precision.master or layout.dtype
        off_device = self.has_device_memory and bucket.place is MemoryPlace.DEVICE
        needs_master = taken and (off_device or bucket.place is MemoryPlace.DISK)
        separate = dtype != layout.dtype or needs_master
        if separate:
            self._masters(bucket, fragments, dtype.itemsize, taken)
        pieces = [piece for fragment in fragments for piece in tier.pieces(fragment)]
        owned = [
            SimulatedFragment(
                fragment=piece,
                separate=separate,
                storage=layout.index if bucket.flat else (layout.index, piece.param),
                start=piece.shard_offset if bucket.flat else piece.param_offset,
                master_size=dtype.itemsize,
                staged=separate and needs_master,
                low_size=layout.dtype.itemsize,
                state=self.optimizer.groups[group_of[piece.param]],
            )
            for piece in pieces
        ]
        near = MemoryPlace.DEVICE if self.has_device_memory else bucket.state_place
        if self.plan.speculates or (self.plan.state_offload is not None and self.plan.zenflow is not None):
            self._shadow_copies(owned, bucket.state_place, here=taken or not self.has_device_memory)
        if self.plan.zenflow is not None:
            self._columns(
                owned, self.plan.zenflow, near, MemoryPlace.HOST if self.has_device_memory else near
            )
        if taken:
            return owned
        for one in owned:
            nbytes = sum(one.state.per_element) * one.numel + one.state.besides(one.numel)
            self.ledger.add(TRAINING, bucket.state_place, MemoryKind.STATE, nbytes)
        return []

    def _shadow_copies(self, owned: Sequence[SimulatedFragment], place: MemoryPlace, *, here: bool) -> None:
        """Count the shadow copies that ``Speculation`` updates: masters, state, and weights in low precision."""
        if here and self.optimizer.elementwise:
            each = (
                one.master_size + sum(one.state.per_element) + one.separate * one.low_size for one in owned
            )
            nbytes = sum(size * one.numel for size, one in zip(each, owned, strict=True))
            self.ledger.add(
                STEADY, MemoryPlace.HOST if self.has_device_memory else place, MemoryKind.STATE, nbytes
            )

    def _columns(
        self, owned: Sequence[SimulatedFragment], flow: ZenFlowPlan, near: MemoryPlace, host: MemoryPlace
    ) -> None:
        """Count ZenFlow's buffers: packed state of the selected columns and their positions, the sum of the deferred
        gradients, and their mean on the host."""
        numel = sum(one.numel for one in owned)
        each = (one.numel * (one.master_size + sum(one.state.per_element)) for one in owned)
        self.ledger.add(
            TRAINING, host if flow.offload else near, MemoryKind.STATE, round(flow.ratio * sum(each))
        )
        self.ledger.add(TRAINING, near, MemoryKind.STATE, round(flow.ratio * numel) * 8)
        if flow.ratio < 1.0:
            self.ledger.add(TRAINING, near, MemoryKind.GRADIENTS, numel * 4)
            self.ledger.add(
                STEADY, host, MemoryKind.GRADIENTS, sum(one.numel * one.low_size for one in owned)
            )

    def _masters(self, bucket: BucketUse, fragments: Sequence[Fragment], size: int, taken: bool) -> None:
        numels = [bucket.layout.shard_numel] if bucket.flat else [f.numel for f in fragments]
        offload = self.plan.state_offload
        for numel in numels:
            if taken and offload is not None and self._swaps:
                self.memory.file("optimizer", numel * size)
                self.storing = max(self.storing, min(numel, offload.sub_group_numel) * size)
            elif taken and offload is not None:
                self.memory.host(self.ledger, FROM_READY, MemoryKind.MASTERS, numel * size, pin=offload.pin)
            else:
                self.ledger.add(FROM_READY, bucket.state_place, MemoryKind.MASTERS, numel * size)

    def _pass_through_slots(self, owned: list[SimulatedFragment], gradients: Sequence[int]) -> None:
        """Count the sub-groups' state, their records in the file, and their staging slots. ``gradients``: bytes of the
        gradient shards in the file."""
        if not owned or not isinstance(self.tier, OffloadedTier):
            return
        groups = [part[0] for part in sub_groups([owned], self.tier.group_numel)]
        if self.tier.resident:
            groups.insert(0, [])  # the device's resident part, without a slot, is updated first
        self.ledger.add(
            TRAINING, MemoryPlace.HOST, MemoryKind.STATE, sum(one.state.besides(one.numel) for one in owned)
        )
        staged = [_together(one.numel * one.low_size for one in group if one.staged) for group in groups]
        states = [
            _together(one.numel * n for one in group for n in one.state.per_element) for group in groups
        ]
        if not self._swaps:
            elements = sum(one.numel * sum(one.state.per_element) for one in owned)
            self.ledger.add(TRAINING, MemoryPlace.HOST, MemoryKind.STATE, elements)
            self._slots(TRAINING, staged)
            return
        masters = [_master_records(group) for group in groups]
        first = [_in_slot(records) + s for records, s in zip(masters, staged, strict=True)]
        later = [
            _in_slot([*records, (0, n)] if n else records) + s
            for records, n, s in zip(masters, states, staged, strict=True)
        ]
        self.ledger.add(
            [MemoryPhase.INITIALIZE, MemoryPhase.READY],
            MemoryPlace.DISK,
            MemoryKind.SWAP,
            self.memory.grown("optimizer"),
        )
        for nbytes in (*gradients, *filter(None, states)):
            self.memory.file("optimizer", nbytes)
        self.ledger.add(TRAINING, MemoryPlace.DISK, MemoryKind.SWAP, self.memory.grown("optimizer"))
        self._slots([MemoryPhase.FIRST_UPDATE], first)
        self._slots(STEADY, later)
        # The first update creates state in pageable memory and writes it to the file, one sub-group at a time.
        self.ledger.add([MemoryPhase.FIRST_UPDATE], MemoryPlace.HOST, MemoryKind.STAGING, 2 * max(states))

    def _slots(self, phases: Sequence[MemoryPhase], sub_groups: Sequence[int]) -> None:
        """Count the staging slots: sub-group i uses slot i modulo their number; a slot has the size of its largest."""
        count = self.plan.state_offload.slots if self.plan.state_offload is not None else 1
        for slot in range(count):
            nbytes = round_up(max(sub_groups[slot::count], default=0), swap_file.PAGE)
            self.memory.host(self.ledger, phases, MemoryKind.STAGING, nbytes, pin=True)


def _master_records(group: Sequence[SimulatedFragment]) -> list[tuple[int, int]]:
    """Return a sub-group's records of masters in the file as ``(offset in the page, bytes)``: one contiguous record per
    storage, including gaps."""
    spans: dict[Any, tuple[int, int]] = {}
    for one in group:
        if one.separate:
            start = one.start * one.master_size
            stop = start + one.numel * one.master_size
            low, high = spans.get(one.storage, (start, stop))
            spans[one.storage] = min(low, start), max(high, stop)
    return [(low % swap_file.PAGE, high - low) for low, high in spans.values()]


def _in_slot(records: Iterable[tuple[int, int]]) -> int:
    """Return the slot bytes of these records (``SubGroup.spans``)."""
    stop = 0
    for skew, nbytes in records:
        stop = round_up(stop, swap_file.PAGE) + skew + nbytes
    return round_up(stop, ALIGN)


def _together(sizes: Iterable[int]) -> int:
    """Return the bytes of tensors laid end to end in a slot, with alignment."""
    return sum(round_up(nbytes, ALIGN) for nbytes in sizes)
