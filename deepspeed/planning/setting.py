"""Input of the planner: the model, the plan, the ranks, and the buckets into which a run would cut the model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING

from deepspeed.config.plan import Plan
from deepspeed.planning.ledger import MemoryPlace
from deepspeed.planning.optimizer_states import OptimizerProfile
from deepspeed.planning.planned_model import PlannedModel
from deepspeed.zero.layout import BucketLayout
from deepspeed.zero.partitioning import cut_sharded, cut_whole
from deepspeed.zero.replica_groups import DENSE, expert_parallel_size

if TYPE_CHECKING:
    from deepspeed.config.sections.zero import DeepSpeedZeroConfig


class SumScratch(Enum):
    """Scratch memory of a sum over ranks, by transport."""

    NONE = auto()
    """Ranks share host memory."""
    EXCHANGED = auto()
    """Ranks on devices (``comm/transports/exchanged_sums.py``)."""
    MESSAGES = auto()
    """CPU ranks without shared memory (``comm/transports/gloo.py``)."""


@dataclass(slots=True)
class BucketUse:
    """A bucket and the place of this rank's shard. ``flat``: its parameters are views of one buffer."""

    layout: BucketLayout
    place: MemoryPlace
    flat: bool
    trained: bool
    persistent: bool = False

    @property
    def resting_bytes(self) -> int:
        """Bytes of this rank's shard, which stage 3 keeps between uses."""
        return self.layout.shard_numel * self.layout.dtype.itemsize

    @property
    def state_place(self) -> MemoryPlace:
        """Place of resident masters and state: with the weights, but on the host if those are in a file."""
        return MemoryPlace.HOST if self.place is MemoryPlace.DISK else self.place


@dataclass(frozen=True, kw_only=True)
class RankSetting:
    """A model, a plan, and the ranks.

    ``ranks``: all data-parallel ranks. ``device_type``: with "cpu", device memory is host memory. ``zero_init``: the
    model is built under ``zero.Init`` (stage 3) and is never whole on a rank.
    """

    model: PlannedModel
    plan: Plan
    zero: DeepSpeedZeroConfig
    optimizer: OptimizerProfile
    ranks: int
    micro_batches: int = 1
    device_type: str = "cuda"
    zero_init: bool = False
    shared_memory: bool = True
    """Whether CPU ranks communicate through shared memory."""

    @property
    def has_device_memory(self) -> bool:
        """True if the device has its own memory."""
        return self.device_type != "cpu"

    @property
    def sum_scratch(self) -> SumScratch:
        if self.has_device_memory:
            return SumScratch.EXCHANGED
        return SumScratch.NONE if self.shared_memory else SumScratch.MESSAGES

    @property
    def shards(self) -> int:
        """Number of ranks that share one copy of dense weights: all, or a MiCS group."""
        return self.shards_by_group[DENSE]

    @cached_property
    def shards_by_group(self) -> dict[str, int]:
        """Number of ranks that share one copy, by replica group."""
        size = int(self.zero.mics_shard_size)
        wanted = size if self.plan.zero.in_groups else self.ranks
        names = {DENSE, *(spec.replica_group for spec in self.model.specs)}
        return {name: min(wanted, self.ranks // expert_parallel_size(name, self.ranks)) for name in names}

    @property
    def near(self) -> MemoryPlace:
        """The place where the model computes."""
        return MemoryPlace.DEVICE if self.has_device_memory else MemoryPlace.HOST

    @cached_property
    def buckets(self) -> list[BucketUse]:
        model, plan = self.model, self.plan
        if not plan.zero.shard_params:
            layouts = cut_whole(
                model.specs[: model.trained], plan, self.shards_by_group, self.optimizer.grain
            )
            flat = plan.state_offload is not None
            return [
                BucketUse(layout, self.near, flat=flat or layout.num_shards > 1, trained=True)
                for layout in layouts
            ]
        uses = []
        host_numel = 0
        for layout, persistent in cut_sharded(
            model.specs, self.zero, self.shards_by_group, self.optimizer.grain
        ):
            place, offload = self.near, plan.param_offload
            if offload is not None and not persistent:  # in the order of ``ParamStorage.store``
                place = MemoryPlace.HOST
                if offload.files(layout.shard_numel, host_numel):
                    place = MemoryPlace.DISK
                else:
                    host_numel += layout.shard_numel
            trained = any(slot.param < model.trained for slot in layout.slots)
            uses.append(BucketUse(layout, place, flat=True, trained=trained, persistent=persistent))
        return uses
