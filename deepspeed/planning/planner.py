"""The memory plan of one rank: counts the memory at each place with the functions that build the engine.

``plan_memory`` is arithmetic: it reads no file, queries no device and contacts no rank. Persistent memory is counted
here, temporaries of a step in ``rehearsal.py``, offloaded states and their staging buffers in ``offload.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

from deepspeed.ops.native import DEVICE_PIECE
from deepspeed.planning.event_log import EventRecorder
from deepspeed.planning.ledger import FROM_READY, TRAINING, Ledger, MemoryKind, MemoryPhase, MemoryPlace
from deepspeed.planning.offload import CountedMemory, Offload
from deepspeed.planning.rehearsal import rehearse
from deepspeed.planning.setting import BucketUse, RankSetting
from deepspeed.zero.replica_groups import BROADCAST_NUMEL


class PlanSetting(RankSetting):
    """Input of the planner, with its rehearsal."""

    @cached_property
    def rehearsed(self) -> tuple[Mapping[MemoryPhase, Counter[MemoryKind]], EventRecorder]:
        """The result of ``rehearse``, shared by the memory plan and the step time."""
        return rehearse(self)


def plan_memory(setting: PlanSetting) -> Ledger:
    """Plan the memory of rank 0, which needs the most: every bucket's padding is on the last ranks."""
    ledger = Ledger()
    buckets = setting.buckets
    _building(ledger, setting, buckets)
    _weights(ledger, setting, buckets)
    offload = Offload(ledger, setting)
    offload.place_states([bucket for bucket in buckets if bucket.trained], setting.model.group_of)
    _gradients(ledger, setting, buckets, offload)
    _moving(ledger, setting)
    _update(ledger, setting, buckets, offload)
    _masters_come_last(ledger, offload)
    ledger.notes += setting.model.notes
    return ledger


# Before the first step ---------------------------------------------------------------------------------------


def _building(ledger: Ledger, setting: PlanSetting, buckets: Sequence[BucketUse]) -> None:
    """Count the module as the script builds it, and the peak while ``initialize`` partitions it."""
    model, near = setting.model, setting.near
    sizes = list(zip(model.specs, model.built_itemsizes, strict=True))
    whole = [spec.numel * size for spec, size in sizes]
    ledger.add([MemoryPhase.BUILD], MemoryPlace.HOST, MemoryKind.BUFFERS, model.buffer_bytes)
    ledger.add([MemoryPhase.INITIALIZE], near, MemoryKind.BUFFERS, model.buffer_bytes)
    if setting.zero_init:
        parts = [-(-spec.numel // setting.shards) * spec.dtype.itemsize for spec, _ in sizes]
        place = _init_place(setting)
        _built_in_shards(ledger, setting, parts, whole, place)
        peak = remaining = sum(parts) if place is near else 0
    else:
        parts = [spec.numel * spec.dtype.itemsize for spec, _ in sizes]
        place, remaining = near, sum(parts)
        ledger.add([MemoryPhase.BUILD], MemoryPlace.HOST, MemoryKind.PARAMETERS, sum(whole))
        peak = max(_casting(whole, parts), remaining + _broadcast(setting))
    rested = 0
    for bucket in buckets:
        if not bucket.flat:
            continue
        flat = bucket.layout.padded_numel * bucket.layout.dtype.itemsize
        own = sum(parts[slot.param] for slot in bucket.layout.slots) if place is near else 0
        kept = bucket.resting_bytes if setting.plan.zero.shard_params else flat
        kept = kept if bucket.place is near else 0
        # Parameters are freed as they are copied, shards of zero.Init once the whole bucket is sharded.
        left = remaining if setting.zero_init else remaining - own
        peak = max(peak, remaining + rested + flat, left + rested + flat + kept)
        remaining -= own
        rested += kept + (flat if bucket.persistent else 0)
    ledger.add([MemoryPhase.INITIALIZE], near, MemoryKind.PARAMETERS, max(peak, remaining + rested))


def _casting(whole: Sequence[int], parts: Sequence[int]) -> int:
    """Return the peak in bytes while parameters of ``whole`` bytes are cast to ``parts`` bytes, one after another."""
    now = peak = sum(whole)
    for before, after in zip(whole, parts, strict=True):
        if before != after:
            peak = max(peak, now + after)
            now += after - before
    return peak


def _init_place(setting: PlanSetting) -> MemoryPlace:
    """Return the place where ``zero.Init`` leaves a parameter's shards: the config's offload target, if any."""
    offload = setting.plan.param_offload
    if offload is None:
        return setting.near
    return MemoryPlace.DISK if offload.folder is not None else MemoryPlace.HOST


def _built_in_shards(
    ledger: Ledger, setting: PlanSetting, parts: Sequence[int], whole: Sequence[int], place: MemoryPlace
) -> None:
    """Count a model built under ``zero.Init``: parameters are whole one at a time, on the host if shards do not stay on
    the device. Each is cast, then sharded: at most two copies of it exist."""
    building = setting.near if place is setting.near else MemoryPlace.HOST
    held = 0
    peaks: list[int] = []
    for spec, before, part in zip(setting.model.specs, whole, parts, strict=True):
        after = spec.numel * spec.dtype.itemsize
        peaks.append(held + max(before + (after if after != before else 0), after + part))
        held += part if place is building else 0
    ledger.add([MemoryPhase.BUILD], building, MemoryKind.PARAMETERS, held)
    ledger.add([MemoryPhase.BUILD], building, MemoryKind.GATHERED, max(0, max(peaks, default=0) - held))
    if place is MemoryPlace.HOST and setting.has_device_memory:
        ledger.add([MemoryPhase.INITIALIZE], place, MemoryKind.PARAMETERS, sum(parts))
    elif place is MemoryPlace.DISK:
        memory = CountedMemory(setting.device_type)
        for nbytes in parts:
            memory.file("init", nbytes)
        ledger.add([MemoryPhase.BUILD, MemoryPhase.INITIALIZE], place, MemoryKind.SWAP, memory.grown("init"))


def _broadcast(setting: PlanSetting) -> int:
    """Return the bytes of the largest flat buffer of the initial broadcast."""
    if setting.ranks == 1 or setting.zero_init:
        return 0
    largest = held = 0
    for spec in setting.model.specs:
        nbytes = spec.numel * spec.dtype.itemsize
        held = nbytes if held and held + nbytes > BROADCAST_NUMEL * spec.dtype.itemsize else held + nbytes
        largest = max(largest, held)
    return largest


def _masters_come_last(ledger: Ledger, offload: Offload) -> None:
    """Raise the peak of ``initialize`` to its end, if that is higher: masters exist, and so do the buffers through
    which they are written to storage."""
    for place in MemoryPlace:
        storing = offload.storing if place is MemoryPlace.HOST else 0
        if ledger.total(MemoryPhase.READY, place) + storing > ledger.total(MemoryPhase.INITIALIZE, place):
            for kind in MemoryKind:
                ledger.entries[MemoryPhase.INITIALIZE, place, kind] = ledger.entries[
                    MemoryPhase.READY, place, kind
                ]
            ledger.add([MemoryPhase.INITIALIZE], place, MemoryKind.STAGING, storing)


# Persistent memory -------------------------------------------------------------------------------------------


def _weights(ledger: Ledger, setting: PlanSetting, buckets: Sequence[BucketUse]) -> None:
    model, near = setting.model, setting.near
    ledger.add(FROM_READY, near, MemoryKind.BUFFERS, model.buffer_bytes)
    if not setting.plan.zero.shard_params:
        frozen = model.specs[model.trained :]
        ledger.add(FROM_READY, near, MemoryKind.PARAMETERS, sum(s.numel * s.dtype.itemsize for s in frozen))
        for bucket in buckets:
            numel = bucket.layout.padded_numel if bucket.flat else bucket.layout.numel
            ledger.add(FROM_READY, near, MemoryKind.PARAMETERS, numel * bucket.layout.dtype.itemsize)
        return
    offload = setting.plan.param_offload
    memory = CountedMemory(setting.device_type)
    for bucket in buckets:
        if bucket.place is MemoryPlace.DISK:
            memory.file("param", bucket.resting_bytes)
        elif bucket.place is MemoryPlace.HOST and setting.has_device_memory and offload is not None:
            memory.host(ledger, FROM_READY, MemoryKind.PARAMETERS, bucket.resting_bytes, pin=offload.pin)
        else:
            ledger.add(FROM_READY, bucket.place, MemoryKind.PARAMETERS, bucket.resting_bytes)
        if bucket.persistent:
            whole = bucket.layout.padded_numel * bucket.layout.dtype.itemsize
            ledger.add(FROM_READY, near, MemoryKind.PARAMETERS, whole)
    ledger.add(
        (MemoryPhase.INITIALIZE, *FROM_READY), MemoryPlace.DISK, MemoryKind.SWAP, memory.grown("param")
    )


def _gradients(ledger: Ledger, setting: PlanSetting, buckets: Sequence[BucketUse], offload: Offload) -> None:
    """Count the gradient buffers that buckets keep from the first backward on."""
    plan, near = setting.plan, setting.near
    late = 0
    for bucket in buckets:
        if not bucket.trained:
            continue
        layout, nbytes = bucket.layout, offload.gradient_bytes(bucket.layout)
        leaves = setting.has_device_memory and offload.offloads(layout) and plan.zenflow is None
        if not plan.zero.shard_grads:
            ledger.add(TRAINING, near, MemoryKind.GRADIENTS, nbytes * layout.num_shards)
        elif not leaves and not offload.files_gradients(layout):
            ledger.add(TRAINING, near, MemoryKind.GRADIENTS, nbytes)
        if leaves and plan.state_offload is not None:
            offload.memory.host(ledger, TRAINING, MemoryKind.GRADIENTS, nbytes, pin=plan.state_offload.pin)
            late = max(late, nbytes)
    if setting.micro_batches > 1 and plan.zero.shard_grads:  # later micro-batches are added through a copy
        ledger.add([MemoryPhase.BACKWARD], MemoryPlace.HOST, MemoryKind.STAGING, late)


# Temporaries -------------------------------------------------------------------------------------------------


def _moving(ledger: Ledger, setting: PlanSetting) -> None:
    peaks, _ = setting.rehearsed
    for phase, kinds in peaks.items():
        for kind, nbytes in kinds.items():
            ledger.add([phase], setting.near, kind, nbytes)


def _update(ledger: Ledger, setting: PlanSetting, buckets: Sequence[BucketUse], offload: Offload) -> None:
    """Count the temporaries of the update."""
    plan, phases = setting.plan, (MemoryPhase.FIRST_UPDATE, MemoryPhase.STEP)
    resident = [bucket for bucket in buckets if bucket.trained and not offload.offloads(bucket.layout)]
    owned = [f.numel for bucket in resident for f in bucket.layout.owned(0)]
    if setting.has_device_memory and owned:  # the norm: squares in fp64, piece by piece
        ledger.add(phases, setting.near, MemoryKind.UPDATE, 8 * min(max(owned), DEVICE_PIECE))
    if setting.optimizer.fused:
        return
    for bucket in resident:
        master = plan.precision.master or bucket.layout.dtype
        if master != (plan.precision.accumulate or bucket.layout.dtype):
            numel = sum(f.numel for f in bucket.layout.owned(0))
            ledger.add(phases, bucket.state_place, MemoryKind.UPDATE, numel * master.itemsize)
    # torch.optim, fp32: two temporaries of the largest tensor or, on devices (foreach), one of every tensor
    size = 4 * (sum(owned) if setting.has_device_memory else 2 * max(owned, default=0))
    ledger.add(phases, setting.near, MemoryKind.UPDATE, size)
