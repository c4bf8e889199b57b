"""A module with sharded parameters: its buckets, and the parts that gather them around their use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepspeed.comm.collectives import Communicator
from deepspeed.comm.groups import default_timeout, new_group
from deepspeed.config.plan import Packing, Plan
from deepspeed.ops.update import traits_of
from deepspeed.zero import params as zero_params
from deepspeed.zero.gathering.coordinator import ParamCoordinator
from deepspeed.zero.gathering.gatherers import FetchingGatherer, LocalGatherer, ReadingGatherer
from deepspeed.zero.gathering.leaf_modules import mark_leaves
from deepspeed.zero.gathering.max_norm_embeddings import MaxNormEmbeddings
from deepspeed.zero.gathering.param_storage import ParamStorage
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket
from deepspeed.zero.gathering.transitions import Gatherer, LiveBudget
from deepspeed.zero.offload.host_copies import has_own_memory
from deepspeed.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.zero.partitioning import cut_sharded, param_specs, trained_params, with_frozen
from deepspeed.zero.replica_groups import DENSE, ReplicaGroups, ReplicaGroupTable

if TYPE_CHECKING:
    from deepspeed.config.deepspeed_config import DeepSpeedConfig
    from deepspeed.config.sections.zero import DeepSpeedZeroConfig
    from deepspeed.zero.gathering.scheduled_gatherer import GatherChannel
    from deepspeed.zero.gathering.shard_servers import ShardServers

# Modules that only several ranks, or only collectives, need are imported where such a gatherer is made.


class ShardedModel:
    """Shards the parameters of ``module`` into ``buckets`` and keeps the parts that serve them.

    ``trained``: indices of the buckets that the optimizer updates. ``prefetch_numel``: elements to gather ahead.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[ShardedBucket],
        replica_groups: ReplicaGroups,
        *,
        trained: set[int],
        budget: LiveBudget,
        prefetch_numel: int,
        storage: ParamStorage,
        packing: Packing,
    ) -> None:
        self.storage = storage
        self.buckets = list(buckets)
        self.replica_groups = replica_groups
        for bucket in self.buckets:
            bucket.flatten()
            self._record_secondary_group(bucket)
        self.trained_buckets = [bucket for bucket in self.buckets if bucket.layout.index in trained]
        device = self.buckets[0].device if self.buckets else torch.device("cpu")
        self.gatherer = make_gatherer(
            self.buckets,
            GatherConnections(replica_groups, packing),
            storage,
            device=device,
            prefetch_numel=prefetch_numel,
        )
        self.coordinator = ParamCoordinator(self.buckets, self.gatherer, budget)
        self.transitions = self.coordinator.transitions
        for bucket in self.buckets:
            bucket.transitions = self.transitions
            bucket.on_shards_written = self.gatherer.shards_written
        self.offload = DeepSpeedZeRoOffload(module, self.coordinator)
        self.prefetch_numel = prefetch_numel
        self._persistent_by_config = {bucket.layout.index for bucket in self.buckets if bucket.persistent}
        self._kept: set[int] = set()  # by ``keep_gathered``
        self.max_norm_embeddings = MaxNormEmbeddings(module, replica_groups.all_ranks)

    def _record_secondary_group(self, bucket: ShardedBucket) -> None:
        if self.replica_groups.group_size <= 1:
            return
        replica_group = self.replica_groups[bucket.layout.replica_group]
        near = replica_group.shard if replica_group.levels is None else replica_group.levels.near
        for param in bucket.params:
            zero_params.set_secondary_group(param, near.group, all_holders=near is replica_group.shard)

    def before_step(self) -> None:
        self.gatherer.end_of_step()
        self.max_norm_embeddings.settle()

    def after_step(self) -> None:
        self.gatherer.shards_written()
        self.coordinator.end_of_step()

    def set_prefetch(self, numel: int) -> None:
        """Set the prefetch window to ``numel`` elements from the next step on. Called on all ranks
        between two steps."""
        if numel != self.prefetch_numel:
            self.prefetch_numel = numel
            self.gatherer.set_prefetch(numel)

    def keep_gathered(self, spare_bytes: int) -> None:
        """Keep buckets whole that together take at most ``spare_bytes`` beyond their shards, the smallest first, in
        addition to those that the config keeps. Called on all ranks between two steps, with the same ``spare_bytes``.

        Buckets whose gathers round the weights are not kept, so that modules see the same weights as before.
        """
        chosen: set[int] = set()
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.layout.padded_numel):
            size = bucket.nbytes
            if bucket.layout.index in self._persistent_by_config or bucket.lossy or size > spare_bytes:
                continue
            chosen.add(bucket.layout.index)
            spare_bytes -= size
        changed = [b for b in self.buckets if b.layout.index in chosen ^ self._kept]
        if not changed:
            return
        self._kept = chosen
        for bucket in changed:
            self.transitions.set_persistent(bucket.layout.index, bucket.layout.index in chosen)
        self.offload.rehook()
        self.gatherer.set_prefetch(self.prefetch_numel)

    def abandon(self) -> None:
        """Release everything and restart the step, after an exception ended the batch."""
        self.coordinator.abandon()
        self.gatherer.abandon()
        self.transitions.reshard_all()

    def destroy(self) -> None:
        """Remove the hooks and make parameters whole again. Collective."""
        self.offload.destroy()
        self.max_norm_embeddings.destroy()
        self.gatherer.settle()
        self.transitions.dissolve()
        self.gatherer.close()
        self.storage.close()


def shard_module(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan,
    config: DeepSpeedConfig,
    replica_groups: ReplicaGroups,
) -> ShardedModel:
    """Shard every parameter of ``module`` (stage 3) and install the hooks that gather them around their use."""
    groups = optimizer.param_groups if optimizer is not None else []
    everything = with_frozen(module, trained_params(module, groups))
    zero = config.zero_config
    mark_leaves(module, zero)
    specs = param_specs(module, everything, plan)
    storage = ParamStorage(plan.param_offload)
    buckets = [
        ShardedBucket(
            layout,
            everything.params,
            replica_groups[layout.replica_group].shard,
            all_ranks=replica_groups[layout.replica_group].written_by,
            persistent=persistent,
            store=torch.clone if persistent else storage.store,  # persistent ones are too small to offload
            check_storage=storage.check if storage.on_file and not persistent else None,
        )
        for layout, persistent in cut_sharded(
            specs, zero, replica_groups.shards(), traits_of(optimizer).grain
        )
    ]
    known = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    sharded = ShardedModel(
        module,
        buckets,
        replica_groups,
        trained={bucket.layout.index for bucket in buckets if any(id(p) in known for p in bucket.params)},
        budget=live_budget(zero),
        prefetch_numel=int(zero.prefetch_bucket_size),
        storage=storage,
        packing=plan.packing,
    )
    if zero.enable_sanity_checks:
        for param in everything.params:
            setattr(param, zero_params.CHECKS_WRITES, True)
    return sharded


def live_budget(zero: DeepSpeedZeroConfig) -> LiveBudget:
    """Return the limits of gathered elements, from the config."""
    return LiveBudget(max_live=int(zero.max_live_parameters), max_reuse=int(zero.max_reuse_distance))


class GatherConnections:
    """Connections of this rank to the shards of the others."""

    def __init__(self, replica_groups: ReplicaGroupTable, packing: Packing) -> None:
        self.replica_groups = replica_groups
        self.packing = packing

    def server(self, buckets: Sequence[ShardedBucket]) -> ShardServers:
        """Make the server that fetches whole buckets from the ranks that hold their shards. Collective."""
        from deepspeed.zero.gathering.gather_pieces import PieceServers, make_pieces
        from deepspeed.zero.gathering.shard_servers import ShardServers

        timeout_s = default_timeout().total_seconds()
        pieces = make_pieces(buckets, self.replica_groups, self.packing)
        if pieces:
            return PieceServers(buckets, self.replica_groups, timeout_s, pieces)
        return ShardServers(buckets, self.replica_groups, timeout_s)

    def channels(self, buckets: Sequence[ShardedBucket], server: ShardServers) -> list[GatherChannel]:
        """Make, by bucket, the channel to the ranks that hold one copy, for gathers only. Collective."""
        from deepspeed.zero.gathering.gather_pieces import PieceChannel, PieceServers

        names = sorted({bucket.layout.replica_group for bucket in buckets})
        plain = {name: _separate_group(self.replica_groups[name].shard) for name in names}
        result: list[GatherChannel] = [plain[bucket.layout.replica_group] for bucket in buckets]
        if isinstance(server, PieceServers):
            near = {
                name: _separate_group(levels.near)
                for name in names
                if (levels := self.replica_groups[name].levels)
            }
            for index, piece in server.pieces.items():
                name = piece.replica_group.name
                result[index] = PieceChannel(piece, near.get(name, plain[name]))
        return result


def make_gatherer(
    buckets: Sequence[ShardedBucket],
    connections: GatherConnections,
    storage: ParamStorage,
    *,
    device: torch.device,
    prefetch_numel: int,
) -> Gatherer:
    """Choose the gatherer for weights that are used on ``device``."""
    used = sorted({DENSE, *(bucket.layout.replica_group for bucket in buckets)})
    alone = all(connections.replica_groups[name].shard.size == 1 for name in used)
    if alone and storage.on_file and not has_own_memory(device):
        assert storage.plan is not None
        return ReadingGatherer(
            buckets,
            partial(storage.read, buckets),
            max_ahead=storage.plan.buffers,
            max_numel=storage.plan.buffer_numel,
        )
    if alone or not buckets:
        return LocalGatherer(buckets)
    server = connections.server(buckets)
    if prefers_collectives(device.type):
        from deepspeed.zero.gathering.scheduled_gatherer import ScheduledGatherer

        return ScheduledGatherer(
            buckets,
            connections.channels(buckets, server),
            server,
            prefetch_numel=prefetch_numel,
            all_ranks=connections.replica_groups.all_ranks,
        )
    return FetchingGatherer(buckets, server)


def _separate_group(ranks: Communicator) -> Communicator:
    """Make a second group of the same ranks, so that gathers and sums can be in flight at the same time. They are
    still launched in one order (Note: one order in launch_order.py)."""
    return ranks if ranks.size == 1 else ranks.for_group(new_group(ranks.ranks, separate=True))


def prefers_collectives(device_type: str) -> bool:
    """Return whether to gather by collectives: accelerators exchange shards directly, while a fetch would go through
    host memory."""
    return device_type != "cpu"
