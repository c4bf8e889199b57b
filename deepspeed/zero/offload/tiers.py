"""Keep master weights and optimizer state off the device, and stream them through the host update.

``OffloadedTier`` (ZeRO-Offload, Ren et al. 2021; ZeRO-Infinity, Rajbhandari et al. 2021) keeps them in host memory or
on storage, and the host updates them sub-group by sub-group, while the next one is read and the previous one is
written. ``states/store.py`` has ``ResidentTier``, which keeps them where the update runs.

[Note: resting tensors] The optimizer keys its state by tensor object, so the objects stay and their memory changes:
``tensor.data`` is a mapping of the swap file between steps (an access reads the file) and a view of a staging slot
while its sub-group is updated. A sub-group always uses the same slot, so addresses that optimizers cache remain
valid.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.config.plan import StateOffload
from deepspeed.ops.aio.memory import LockedMemory
from deepspeed.zero.layout import BucketLayout, Fragment, round_up
from deepspeed.zero.offload.host_copies import has_own_memory, host_empty
from deepspeed.zero.offload.swap_file import PAGE, SwapFile, SwapTransfer
from deepspeed.zero.states.fragments import OwnedFragment, sub_groups
from deepspeed.zero.states.store import Groups, ResidentTier, StateOf

ALIGN = 64  # bytes; alignment of every tensor in a slot


@dataclass(slots=True)
class SwapRecord:
    """Adjacent tensors in the swap file, at ``offsets`` (bytes) in ``resting`` and in the record's span of a slot."""

    resting: Tensor  # [nbytes] uint8
    tensors: list[Tensor]
    offsets: list[int]
    numels: list[int]
    skew: int = 0
    """Offset within its page of the file: the record has the same one in a slot, so that direct I/O needs no bounce
    copy (docs/nvme.md)."""

    def bind(self, base: Tensor) -> None:
        """Make the tensors views of ``base`` [nbytes] (Note: resting tensors)."""
        for tensor, start, numel in zip(self.tensors, self.offsets, self.numels, strict=True):
            stop = start + numel * tensor.dtype.itemsize
            tensor.data = base[start:stop].view(tensor.dtype)


@dataclass(slots=True)
class SubGroup:
    """Fragments that are updated together; ``groups[g]`` belong to optimizer group g."""

    groups: list[list[OwnedFragment]]
    records: list[SwapRecord] = field(default_factory=list)
    known: set[int] = field(default_factory=set)  # ids of the tensors in records
    staged: list[OwnedFragment] = field(default_factory=list)  # updated weights pass through the slot
    views: dict[int, Tensor] = field(default_factory=dict)  # id of a staged fragment -> its view of the slot
    resident: bool = False  # state and masters are kept where they are updated
    base: int = 0  # address of the slot that ``views`` belong to

    def spans(self) -> Iterator[tuple[SwapRecord, slice]]:
        """Yield the records with their byte ranges in a slot."""
        start = 0
        for record in self.records:
            start = round_up(start, PAGE) + record.skew
            yield record, slice(start, start + record.resting.numel())
            start += record.resting.numel()

    @property
    def nbytes(self) -> int:
        """Return the bytes of a slot that the records take."""
        return max((round_up(span.stop, ALIGN) for _, span in self.spans()), default=0)

    @property
    def staged_nbytes(self) -> int:
        return sum(_weight_bytes(owned) for owned in self.staged)

    @property
    def fragments(self) -> list[OwnedFragment]:
        return [owned for group in self.groups for owned in group]

    def stage(self, buffer: Tensor) -> None:
        """Lay out the staged weights in ``buffer``, after the records; views are reused for the same buffer."""
        if self.views and buffer.data_ptr() == self.base:
            return
        self.base, self.views = buffer.data_ptr(), {}
        start = self.nbytes
        for owned in self.staged:
            assert owned.low is not None
            nbytes = owned.low.numel() * owned.low.element_size()
            self.views[id(owned)] = buffer[start : start + nbytes].view(owned.low.dtype)
            start += _weight_bytes(owned)


def _weight_bytes(owned: OwnedFragment) -> int:
    assert owned.low is not None
    return round_up(owned.low.numel() * owned.low.element_size(), ALIGN)


class StagingSlot:
    """Host memory that sub-groups pass through one after another, with its transfers in flight."""

    def __init__(self, memory: LockedMemory) -> None:
        self._memory = memory
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.transfers: list[tuple[SwapFile, SwapTransfer]] = []
        self.copied: Any = None  # event after the last copy to the device

    def reserve(self, nbytes: int) -> None:
        if self.buffer.numel() < nbytes:
            self.buffer = self._memory.new(round_up(nbytes, 4096), torch.uint8)

    def settle(self) -> None:
        """Wait for all transfers and copies of the buffer."""
        self.finish_transfers()
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None

    def finish_transfers(self) -> None:
        """Wait for storage only; copies to the device may run into the next forward."""
        transfers, self.transfers = self.transfers, []
        failure: OSError | None = None
        for swap, transfer in transfers:
            try:
                swap.finish(transfer)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure


class OffloadedTier(ResidentTier):
    """Tier that keeps masters and state in host memory, or with ``swap`` in a file; the host updates them.

    ``weights_swap``: the file that stores the model's own weights (``offload_param``).
    """

    def __init__(
        self,
        plan: StateOffload,
        swap: SwapFile | None,
        weights_swap: SwapFile | None = None,
        *,
        cuts: bool = True,
        resident: frozenset[int] = frozenset(),
    ) -> None:
        self.plan = plan
        self.swap = swap
        self.weights_swap = weights_swap
        self.cuts = cuts and swap is not None
        self.on_file = swap is not None or weights_swap is not None
        self.resident = resident
        self.group_numel = plan.sub_group_numel if cuts else sys.maxsize
        self.sub_groups: list[SubGroup] = []
        memory = LockedMemory()
        self.slots = [StagingSlot(memory) for _ in range(plan.slots)]
        self.bytes_to_device = 0  # weights sent to the device
        self._sub_group_of: dict[int, int] = {}  # id of an owned fragment -> its sub-group
        self._state_of: StateOf = lambda _: {}

    # Placement ----------------------------------------------------------------------------------------------

    def offloads(self, layout: BucketLayout) -> bool:
        return layout.index not in self.resident

    def needs_master(self, weights: Tensor) -> bool:
        return has_own_memory(weights.device) or self._is_swapped(weights)

    def pieces(self, fragment: Fragment) -> Sequence[Fragment]:
        """Split the fragment into pieces of at most ``sub_group_numel`` elements, which elementwise optimizers do not
        notice."""
        if not self.cuts:
            return [fragment]
        f, size = fragment, self.group_numel
        return [
            Fragment(f.param, f.param_offset + low, f.shard_offset + low, min(size, f.numel - low))
            for low in range(0, f.numel, size)
        ]

    def new_masters(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy the masters to the swap file, piece by piece, or to (pinned) host memory."""
        if self.swap is None:
            host = host_empty(weights.numel(), dtype, pin=self.plan.pin)
            return host.copy_(weights)
        resting = self.swap.new(weights.numel(), dtype)
        size = self.plan.sub_group_numel
        for low in range(0, weights.numel(), size):
            part = weights[low : low + size].to("cpu", dtype, copy=True)
            self.swap.finish(self.swap.write(part, resting[low : low + size]))
        return resting

    def new_gradients(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for summed gradients. Of a device: (pinned) host memory, the target of copies while backward
        runs. Of the host: a mapping of the swap file, for which the page cache spares the storage while memory is
        free."""
        if has_own_memory(device):
            return host_empty(numel, dtype, pin=self.plan.pin)
        if self.swap is not None:
            return self.swap.new(numel, dtype)
        return super().new_gradients(numel, dtype, device)

    def adopt(self, groups: Sequence[Sequence[OwnedFragment]], state_of: StateOf) -> None:
        self._state_of = state_of
        resident = [[o for o in group if not self.offloads(o.grad_bucket.layout)] for group in groups]
        offloaded = [[o for o in group if self.offloads(o.grad_bucket.layout)] for group in groups]
        new = [SubGroup(part) for part in sub_groups(offloaded, self.group_numel)]
        if any(resident):  # first: the device updates it while the host updates the others
            new.insert(0, SubGroup(resident, resident=True))
        if self.sub_groups and self.group_numel == sys.maxsize:  # one sub-group, which later fragments join
            for sub_group in new:
                self._enter(self.sub_groups[0], sub_group.groups, 0)
        else:
            for sub_group in new:
                groups, sub_group.groups = sub_group.groups, []
                self.sub_groups.append(sub_group)
                self._enter(sub_group, groups, len(self.sub_groups) - 1)
        self.store_new_state()  # state that the client's optimizer already had

    def _enter(self, sub_group: SubGroup, groups: list[list[OwnedFragment]], number: int) -> None:
        """Add fragments to sub-group ``number``."""
        sub_group.groups += [[] for _ in groups[len(sub_group.groups) :]]
        for own, added in zip(sub_group.groups, groups, strict=True):
            own += added
        fragments = [owned for group in groups for owned in group]
        if self.swap is not None and not sub_group.resident:
            for record in _master_records(fragments):
                record.skew = self.swap.offset_of(record.resting) % PAGE
                sub_group.records.append(record)
                sub_group.known.update(map(id, record.tensors))
        for owned in fragments:
            self._sub_group_of[id(owned)] = number
            if not sub_group.resident and self._stages(owned):
                sub_group.staged.append(owned)
        sub_group.views = {}  # the staged weights follow the records

    def _stages(self, owned: OwnedFragment) -> bool:
        """Return whether the updated weights pass through the slot on their way to the model."""
        low = owned.low
        return low is not None and (has_own_memory(low.device) or self._is_swapped(low))

    def _is_swapped(self, low: Tensor) -> bool:
        return self.weights_swap is not None and self.weights_swap.holds(low)

    def store_new_state(self) -> None:
        if self.swap is not None:
            for sub_group in self.sub_groups:
                if not sub_group.resident:
                    self._store_new(sub_group)

    def forget_state(self) -> None:
        for sub_group in self.sub_groups:
            masters = {id(owned.master) for owned in sub_group.fragments}
            sub_group.records = [r for r in sub_group.records if id(r.tensors[0]) in masters]
            sub_group.known &= masters
            sub_group.views = {}

    def check(self) -> None:
        for swap in (self.swap, self.weights_swap):
            if swap is not None:
                swap.check()

    def _store_new(self, sub_group: SubGroup) -> None:
        """Move state tensors that are not in the file yet into it, as one record."""
        assert self.swap is not None
        new: list[Tensor] = []
        for owned in sub_group.fragments:
            new += [
                t
                for t in self._state_of(owned).values()
                if isinstance(t, Tensor)
                and t.shape == owned.master.shape
                and t.dim()
                and id(t) not in sub_group.known
            ]
        if not new:
            return
        offsets: list[int] = []
        nbytes = 0
        for tensor in new:
            offsets.append(nbytes)
            nbytes += round_up(tensor.numel() * tensor.element_size(), ALIGN)
        resting = self.swap.new(nbytes, torch.uint8)
        values = torch.empty(nbytes, dtype=torch.uint8)
        for tensor, offset in zip(new, offsets, strict=True):
            raw = tensor.detach().view(torch.uint8)
            values[offset : offset + raw.numel()] = raw
        self.swap.finish(self.swap.write(values, resting))
        record = SwapRecord(resting, new, offsets, [t.numel() for t in new])
        record.bind(resting)
        sub_group.records.append(record)
        sub_group.known.update(map(id, new))
        sub_group.views = {}  # the staged weights follow the records

    def batches(self, groups: list[list[OwnedFragment]]) -> Iterator[list[list[OwnedFragment]]]:
        for number in range(len(self.sub_groups)):
            part = [[o for o in group if self._sub_group_of[id(o)] == number] for group in groups]
            if any(part):
                yield part
                self.store_new_state()

    def describe(self) -> str:
        """Return one line for the log at start-up."""
        where = self.swap.folder if self.swap is not None else "host memory"
        return (
            f"optimizer state is kept in {where} and updated on the host in {len(self.sub_groups)} "
            f"sub-groups through {len(self.slots)} buffers"
        )

    # The update ---------------------------------------------------------------------------------------------

    def update(self, groups: Groups, apply: Callable[[Groups], None]) -> None:
        parts = list(self._parts(groups))
        if not parts:
            apply(groups)  # other ranks may have fragments to update, and the optimizer may be collective
        started = 0
        try:
            for i, (number, part) in enumerate(parts):
                ahead = i + 2 if self.plan.read_ahead else i + 1
                while started < min(ahead, len(parts)):
                    if started > i and self._slot(parts[started][0]) is self._slot(number):
                        break
                    self._start_reading(parts[started][0])
                    started += 1
                self._update_part(number, part, apply)
            for slot in self.slots:
                slot.finish_transfers()
        except BaseException:  # finish what is in flight and put tensors back at rest
            for number, _ in parts:
                for record in self.sub_groups[number].records:
                    record.bind(record.resting)
            self._finish_ignoring_errors()  # the first one is being raised
            raise

    def _parts(self, groups: Groups) -> Iterator[tuple[int, Groups]]:
        """Yield ``groups`` by sub-group, without sub-groups that have nothing to update."""
        chosen: dict[int, list[list[int]]] = {}
        for g, group in enumerate(groups):
            for i, owned in enumerate(group.fragments):
                number = self._sub_group_of[id(owned)]
                chosen.setdefault(number, [[] for _ in groups])[g].append(i)
        for number in sorted(chosen):
            picked = zip(groups, chosen[number], strict=True)
            yield number, [group.pick(indices) for group, indices in picked]

    def _slot(self, number: int) -> StagingSlot:
        return self.slots[number % len(self.slots)]

    def _start_reading(self, number: int) -> None:
        sub_group, slot = self.sub_groups[number], self._slot(number)
        slot.settle()
        slot.reserve(sub_group.nbytes + sub_group.staged_nbytes)
        for record, span in sub_group.spans():
            assert self.swap is not None
            slot.transfers.append((self.swap, self.swap.read(slot.buffer[span], record.resting)))

    def _update_part(self, number: int, part: Groups, apply: Callable[[Groups], None]) -> None:
        sub_group, slot = self.sub_groups[number], self._slot(number)
        slot.settle()
        for record, span in sub_group.spans():
            record.bind(slot.buffer[span])
        sub_group.stage(slot.buffer)
        staged = _substitute_views(part, sub_group.views)
        apply(part)
        self._write_weights(staged, slot)
        for record, span in sub_group.spans():
            assert self.swap is not None
            slot.transfers.append((self.swap, self.swap.write(slot.buffer[span], record.resting)))
            record.bind(record.resting)
        if self.swap is not None and not sub_group.resident:
            self._store_new(sub_group)
        if not self.plan.write_behind:
            slot.settle()

    def _write_weights(self, staged: list[tuple[Tensor, Tensor]], slot: StagingSlot) -> None:
        copied = False
        for buffer, low in staged:
            if self._is_swapped(low):
                assert self.weights_swap is not None
                slot.transfers.append((self.weights_swap, self.weights_swap.write(buffer, low)))
            else:
                low.copy_(buffer, non_blocking=True)
                self.bytes_to_device += buffer.numel() * buffer.element_size()
                copied = True
        if copied:
            slot.copied = get_accelerator().Event()
            slot.copied.record()

    def _finish_ignoring_errors(self) -> None:
        for slot in self.slots:
            try:
                slot.finish_transfers()
            except OSError:
                continue

    def close(self) -> None:
        # No update is lost by this: each waits for its own writes and raises their errors.
        self._finish_ignoring_errors()
        if self.swap is not None:
            self.swap.close()


def _substitute_views(part: Groups, views: dict[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Make the update write to ``views`` instead of weights that the host cannot reach; return ``(view, weights)``
    pairs."""
    substituted: list[tuple[Tensor, Tensor]] = []
    for group in part:
        for i, owned in enumerate(group.fragments):
            view = views.get(id(owned))
            if view is not None and owned.low is not None:
                group.lows[i] = view
                substituted.append((view, owned.low))
    return substituted


def _master_records(fragments: Sequence[OwnedFragment]) -> Iterator[SwapRecord]:
    """Yield the records of a sub-group's masters, which are already in the file: one per bucket."""
    by_storage: dict[int, list[Tensor]] = {}
    for owned in fragments:
        if owned.low is not None:  # else the master is the weight itself, stored elsewhere
            by_storage.setdefault(owned.master.untyped_storage().data_ptr(), []).append(owned.master)
    for base, masters in by_storage.items():
        start = min(master.data_ptr() for master in masters)
        stop = max(master.data_ptr() + master.numel() * master.element_size() for master in masters)
        raw = torch.empty(0, dtype=torch.uint8).set_(
            masters[0].untyped_storage(), start - base, (stop - start,), (1,)
        )
        offsets = [master.data_ptr() - start for master in masters]
        yield SwapRecord(raw, masters, offsets, [master.numel() for master in masters])


def _open_swap(plan: StateOffload, folder: Path) -> SwapFile:
    return SwapFile(folder, plan.storage, key="zero_optimization.offload_optimizer.nvme_path")


def make_tier(
    plan: StateOffload | None,
    device: torch.device,
    layouts: Sequence[BucketLayout],
    *,
    weights_swap: SwapFile | None,
    elementwise: bool,
    grain: int = 1,
    open_swap: Callable[[StateOffload, Path], SwapFile] = _open_swap,
) -> ResidentTier:
    """Choose the tier for the state of weights on ``device``.

    ``elementwise``: whether the optimizer may get its tensors in pieces, one sub-group after another, cut at
    multiples of ``grain``. ``open_swap``: opens the swap file of a plan with a folder.
    """
    if plan is None:
        return ResidentTier()
    plan = replace(plan, sub_group_numel=max(plan.sub_group_numel // grain, 1) * grain)
    separate_host = has_own_memory(device)
    swap = None
    if plan.folder is not None:
        swap = open_swap(plan, plan.folder)
    elif not separate_host:
        return ResidentTier()  # on the CPU the state of resident weights is in host memory already
    # A collective update (LAMB, Muon) updates everything at once, on the host.
    resident = device_share(layouts, plan.ratio) if separate_host and elementwise else frozenset[int]()
    return OffloadedTier(plan, swap, weights_swap, cuts=elementwise, resident=resident)


def device_share(layouts: Sequence[BucketLayout], ratio: float) -> frozenset[int]:
    """Return the buckets whose state stays on the device (Twin-Flow), about ``1 - ratio`` of the elements. These are
    the first ones: backward reaches them last, when the others are already being copied to the host."""
    room = (1.0 - ratio) * sum(layout.shard_numel for layout in layouts)
    chosen: set[int] = set()
    for layout in layouts:
        if layout.shard_numel / 2 <= room:
            chosen.add(layout.index)
            room -= layout.shard_numel
    return frozenset(chosen)
