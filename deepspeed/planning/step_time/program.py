"""The events of one rank in a step, in order, recorded in a rehearsal of the engine's own code.

A program is a list of micro-batches, each a list of events of the training thread: it computes a call, starts a
collective, or waits for one. The engine's code (``planning/rehearsal.py``) thus decides on the order of gathers, the
filling of buckets, the sums in flight and the waits; none of it is modelled twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepspeed.planning.event_log import CollectiveStart, CollectiveWait, ComputeCall
from deepspeed.planning.offload import BucketUse
from deepspeed.planning.planner import PlanSetting
from deepspeed.planning.rehearsal import in_groups
from deepspeed.zero.replica_groups import expert_parallel_size


@dataclass(frozen=True, slots=True)
class OptimizerUpdate:
    """The optimizer's update of ``elements`` elements."""

    elements: int


Event = ComputeCall | CollectiveStart | CollectiveWait | OptimizerUpdate


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Events of a step. ``micro_batches``: those of each micro-batch; ``update``: those of the optimizer step."""

    micro_batches: Sequence[Sequence[Event]]
    update: Sequence[Event]

    @property
    def events(self) -> list[Event]:
        return [event for part in (*self.micro_batches, self.update) for event in part]


def program_of(setting: PlanSetting, micro_batches: int | None = None) -> StepProgram:
    """Return the events of a steady step of rank 0. Of several micro-batches, all but the last are alike.

    ``micro_batches``: overrides the number in ``setting``.
    """
    count = setting.micro_batches if micro_batches is None else micro_batches
    if (count > 1) != (setting.micro_batches > 1):  # a single one is both first and last: rehearse again
        setting = replace(setting, micro_batches=count)
    _, recorder = setting.rehearsed
    first, last = recorder.parts[0], recorder.parts[-1]
    return StepProgram([first] * (count - 1) + [last], _update(setting, setting.buckets, recorder.started))


def _update(setting: PlanSetting, buckets: Sequence[BucketUse], number: int) -> list[Event]:
    """Return the events of the update: the vote's all-reduce (norm, used parameters), the optimizer, the gathers of new
    weights."""
    begun: list[CollectiveStart] = []
    if setting.ranks > 1:
        begun.append(CollectiveStart(number, "all_reduce", 8.0 * (2 + setting.model.trained), setting.ranks))
    updated = [bucket.layout for bucket in buckets if bucket.trained]
    elements = sum(fragment.numel for layout in updated for fragment in layout.owned(0))
    for bucket in buckets:
        published = _published(setting, bucket)
        if published is not None:
            operation, nbytes, ranks, stride = published
            begun.append(CollectiveStart(number + len(begun), operation, nbytes, ranks, stride))
    agreed = [event for event in begun if event.operation == "all_reduce"]
    gathers = begun[len(agreed) :]
    return [
        *(event for start in agreed for event in (start, CollectiveWait(start.number))),
        OptimizerUpdate(elements),
        *gathers,
        *(CollectiveWait(start.number) for start in gathers),
    ]


def _published(setting: PlanSetting, bucket: BucketUse) -> tuple[str, float, int, int] | None:
    """Return (operation, bytes, ranks, stride) of the bucket's gather after an update, or None: of weights that are
    whole on every rank, or of shards across the groups that each hold a copy (``zero/gathering/gather_pieces.py``).
    """
    layout, group = bucket.layout, setting.plan.packing.group
    if layout.num_shards == 1:
        return None
    stride = expert_parallel_size(layout.replica_group, setting.ranks)
    if setting.plan.zero.shard_params and not bucket.persistent:
        if not in_groups(layout.num_shards, group):
            return None
        across = layout.num_shards // group
        return (
            "all_gather",
            float(layout.padded_numel * layout.dtype.itemsize / group),
            across,
            stride * group,
        )
    if not bucket.trained:
        return None
    return "all_gather", float(layout.padded_numel * layout.dtype.itemsize), layout.num_shards, stride
