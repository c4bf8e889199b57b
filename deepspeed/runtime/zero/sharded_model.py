"""A module whose parameters are sharded: its buckets, and what brings them together around their use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from deepspeed.comm.collectives import Communicator
from deepspeed.constants import default_pg_timeout
from deepspeed.runtime.plan import Cadence
from deepspeed.runtime.zero.coordinator import LiveBudget, ParamCoordinator
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.shard_server import ShardServer
from deepspeed.runtime.zero.sharded_bucket import ShardedBucket


class ShardedModel:
    """Cuts the parameters of ``module`` into ``buckets`` and keeps the parts that serve them.

    ``trained``: indices of the buckets that the optimizer updates.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[ShardedBucket],
        communicator: Communicator,
        *,
        trained: set[int],
        budget: LiveBudget,
    ) -> None:
        self.buckets = list(buckets)
        self.communicator = communicator
        for bucket in self.buckets:
            bucket.flatten()
        self.trained_buckets = [bucket for bucket in self.buckets if bucket.layout.index in trained]
        self.coordinator = ParamCoordinator(self.buckets, self._gather, budget)
        self.server: ShardServer | None = None
        if communicator.size > 1:
            shards = [bucket.shard for bucket in self.buckets if bucket.shard is not None]
            self.server = ShardServer(communicator, shards, default_pg_timeout.total_seconds())
        for bucket in self.buckets:
            bucket.coordinator = self.coordinator
            if self.server is not None:
                bucket.on_change = self.server.advance
        self.offload = DeepSpeedZeRoOffload(module, self.coordinator)

    @property
    def cadence(self) -> Cadence:
        """With room for every parameter there is room for whole gradients between micro-batches, too: then the
        wire carries each once per step."""
        return Cadence.AT_BOUNDARY if self.coordinator.keeps_all else Cadence.EVERY_MICRO_BATCH

    @property
    def after_publish(self) -> list[Callable[[], None]]:
        advance = [self.server.advance] if self.server is not None else []
        return [*advance, self.coordinator.end_of_step]

    def _gather(self, index: int) -> None:
        bucket = self.buckets[index]
        full = bucket.allocate()
        assert bucket.shard is not None
        if self.server is None:
            full.copy_(bucket.shard)
        else:
            self.server.fetch(index, full)
        bucket.arrived()

    def destroy(self) -> None:
        """Undo everything; parameters become whole again. Collective."""
        self.offload.destroy()
        for bucket in self.buckets:
            bucket.destroy()
        if self.server is not None:
            self.server.close()
