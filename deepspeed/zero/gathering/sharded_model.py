"""A module with sharded parameters: its buckets, and the parts that gather them around their use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.base.sharded import full_shape
from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.comm.groups import default_timeout, new_group
from deepspeed.config.plan import Packing, Plan
from deepspeed.ops.update import traits_of
from deepspeed.zero import params as zero_params
from deepspeed.zero.gathering.coordinator import LiveBudget, ParamCoordinator
from deepspeed.zero.gathering.gather import FetchingGather, LocalGather, ReadingGather
from deepspeed.zero.gathering.leaf_modules import mark_leaves
from deepspeed.zero.gathering.param_storage import ParamStorage
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket
from deepspeed.zero.offload.host_copies import off_host
from deepspeed.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.zero.partitioning import TrainedParams, cut_sharded, param_specs, trained_params, with_frozen
from deepspeed.zero.replica_groups import DENSE, ReplicaGroups, ReplicaGroupTable

if TYPE_CHECKING:
    from deepspeed.config.deepspeed_config import DeepSpeedConfig
    from deepspeed.config.sections.zero import DeepSpeedZeroConfig
    from deepspeed.zero.gathering.scheduled_gather import GatherChannel
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
            self._record_neighbours(bucket)
        self.trained_buckets = [bucket for bucket in self.buckets if bucket.layout.index in trained]
        device = self.buckets[0].device if self.buckets else torch.device("cpu")
        self.gatherer = make_gatherer(
            self.buckets,
            GatherLinks(replica_groups, packing),
            storage,
            device=device,
            prefetch_numel=prefetch_numel,
        )
        self.coordinator = ParamCoordinator(self.buckets, self.gatherer, budget)
        self.transitions = self.coordinator.transitions
        for bucket in self.buckets:
            bucket.transitions = self.transitions
            bucket.on_change = self.gatherer.changed
        self.offload = DeepSpeedZeRoOffload(module, self.coordinator)
        self.prefetch_numel = prefetch_numel
        self._kept_by_config = {bucket.layout.index for bucket in self.buckets if bucket.persistent}
        self._kept: set[int] = set()  # by ``keep_gathered``
        self.row_norms = RowNorms(module, replica_groups.all_ranks)

    def _record_neighbours(self, bucket: ShardedBucket) -> None:
        if self.replica_groups.group_size <= 1:
            return
        replica_group = self.replica_groups[bucket.layout.replica_group]
        near = replica_group.shard if replica_group.levels is None else replica_group.levels.near
        for param in bucket.params:
            zero_params.note_neighbours(param, near.group, all_holders=near is replica_group.shard)

    def before_step(self) -> None:
        self.gatherer.end_of_step()
        self.row_norms.settle()

    def after_step(self) -> None:
        self.gatherer.changed()
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
            if bucket.layout.index in self._kept_by_config or bucket.lossy or size > spare_bytes:
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
        self.row_norms.destroy()
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
    held = [p for group in (optimizer.param_groups if optimizer is not None else []) for p in group["params"]]
    trained = (
        trained_params(module, optimizer.param_groups) if optimizer is not None else TrainedParams.none()
    )
    everything = with_frozen(module, trained)
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
            keep=storage.keep_persistent if persistent else storage.keep,
            check=storage.check if storage.on_file and not persistent else None,
        )
        for layout, persistent in cut_sharded(
            specs, zero, replica_groups.shards(), traits_of(optimizer).grain
        )
    ]
    known = {id(p) for p in held if p.requires_grad}
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


class GatherLinks:
    """Connections of this rank to the shards of the others."""

    def __init__(self, replica_groups: ReplicaGroupTable, packing: Packing) -> None:
        self.replica_groups = replica_groups
        self.packing = packing

    @property
    def all_ranks(self) -> Communicator:
        return self.replica_groups.all_ranks

    def shards(self, replica_group: str) -> int:
        """Return the number of ranks that share one copy of the weights."""
        return self.replica_groups[replica_group].shard.size

    def server(self, buckets: Sequence[ShardedBucket]) -> ShardServers:
        """Make the server that fetches whole buckets from the ranks that hold their shards. Collective."""
        from deepspeed.zero.gathering.quantized_gather import PayloadServers, make_pieces
        from deepspeed.zero.gathering.shard_servers import ShardServers

        timeout_s = default_timeout().total_seconds()
        pieces = make_pieces(buckets, self.replica_groups, self.packing)
        if pieces:
            return PayloadServers(buckets, self.replica_groups, timeout_s, pieces)
        return ShardServers(buckets, self.replica_groups, timeout_s)

    def channels(self, buckets: Sequence[ShardedBucket], server: ShardServers) -> list[GatherChannel]:
        """Make, by bucket, the channel to the ranks that hold one copy, for gathers only. Collective."""
        from deepspeed.zero.gathering.quantized_gather import PayloadServers, PieceChannel

        names = sorted({bucket.layout.replica_group for bucket in buckets})
        plain = {name: _separate_group(self.replica_groups[name].shard) for name in names}
        result: list[GatherChannel] = [plain[bucket.layout.replica_group] for bucket in buckets]
        if isinstance(server, PayloadServers):
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
    links: GatherLinks,
    storage: ParamStorage,
    *,
    device: torch.device,
    prefetch_numel: int,
) -> LocalGather:
    """Choose the gatherer for weights that are used on ``device``."""
    used = sorted({DENSE, *(bucket.layout.replica_group for bucket in buckets)})
    alone = all(links.shards(name) == 1 for name in used)
    if alone and storage.on_file and not off_host(device):
        return ReadingGather(
            buckets, partial(storage.read, buckets), max_ahead=storage.buffers, max_numel=storage.buffer_numel
        )
    if alone or not buckets:
        return LocalGather(buckets)
    server = links.server(buckets)
    if prefers_collectives(device.type):
        from deepspeed.zero.gathering.scheduled_gather import ScheduledGather

        return ScheduledGather(
            buckets,
            links.channels(buckets, server),
            server,
            prefetch_numel=prefetch_numel,
            all_ranks=links.all_ranks,
        )
    return FetchingGather(buckets, server)


def _separate_group(ranks: Communicator) -> Communicator:
    """Make a second group of the same ranks, so that gathers and sums can be in flight at the same time. They are
    still launched in one order (Note: one order in launch_order.py)."""
    return ranks if ranks.size == 1 else ranks.for_group(new_group(ranks.ranks, separate=True))


def prefers_collectives(device_type: str) -> bool:
    """Return whether to gather by collectives: accelerators exchange shards directly, while a fetch would go through
    host memory."""
    return device_type != "cpu"


# ``Embedding(max_norm=...)`` at stage 3: rows clipped by a lookup stay clipped.
#
# torch clips the norm of the rows it is about to look up in place, in the gathered table. The next gather would
# restore the old rows, and each rank looks up different ones. So every rank records the rows it has looked up, and
# before the update all ranks clip their union, in their shards and master weights: as one process would that sees
# every rank's batch. Within the step each rank sees its looked-up rows clipped, since torch clips them again. A
# single rank clips its shards immediately.


class RowNorms:
    """Tracks looked-up rows of the embeddings of ``module`` with a ``max_norm``. ``all_ranks``: all ranks of a step."""

    def __init__(self, module: nn.Module, all_ranks: Communicator) -> None:
        self.all_ranks = all_ranks
        self._tables: list[Any] = [
            each
            for each in module.modules()
            if isinstance(each, (nn.Embedding, nn.EmbeddingBag))
            and each.max_norm is not None
            and isinstance(getattr(each.weight, "ds_owner", None), ShardedBucket)
        ]
        self._seen: dict[nn.Module, Tensor] = {}
        self._handles = [self._watch(table) for table in self._tables]

    def _watch(self, table: Any) -> Any:
        def looked_up(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            ids = args[0] if args else kwargs["input"]
            if self.all_ranks.size == 1:
                self._write_clipped(table, ids)
            else:
                self._remember(table, ids)

        return table.register_forward_hook(untraced(looked_up), prepend=True, with_kwargs=True)

    def _remember(self, table: Any, ids: Tensor) -> None:
        seen = self._seen.get(table)
        if seen is None:
            rows = full_shape(table.weight)[0]
            seen = self._seen[table] = torch.zeros(rows, dtype=torch.int64, device=ids.device)
        seen[ids.detach().reshape(-1)] = 1

    @torch.no_grad()
    def _write_clipped(self, table: Any, ids: Tensor) -> None:
        param, rows = table.weight, ids.detach().reshape(-1).unique()
        whole = param.data.clone()
        kept = param.ds_owner.local_part(param.ds_position).view(param.data.shape)
        if not torch.equal(kept[rows.to(kept.device)], whole[rows].to(kept.device)):
            _write(param, whole)

    def settle(self) -> None:
        """Clip the rows that any rank has looked up since the last step. Collective."""
        if self._tables and self.all_ranks.size > 1:
            self._clip_seen()

    @torch.no_grad()
    def _clip_seen(self) -> None:
        for table in self._tables:
            param = table.weight
            rows = self._rows_of_all(table)
            owner: ShardedBucket = param.ds_owner
            if not rows.numel():
                continue
            owner.transitions.evict_stale(owner.layout.index)  # now sharded on every rank
            whole = torch.empty(full_shape(param), dtype=param.dtype, device=owner.device)
            owner.read_param(param.ds_position, whole)
            torch.embedding_renorm_(whole, rows, float(table.max_norm), float(table.norm_type))
            _write(param, whole)
        self._seen.clear()

    def _rows_of_all(self, table: Any) -> Tensor:
        device = table.weight.ds_owner.device
        seen = self._seen.get(table)
        if seen is None:
            seen = torch.zeros(full_shape(table.weight)[0], dtype=torch.int64, device=device)
        self.all_ranks.all_reduce_max(seen).wait()
        return seen.nonzero().view(-1)

    def destroy(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _write(param: Any, whole: Tensor) -> None:
    """Write to the shards, and to the changed elements of wider master weights; the others keep their bits."""
    access = getattr(param, "_ds_state_access", None)
    if access is not None:
        access.elements_written(param, whole)
    param.ds_owner.write_param(param.ds_position, whole)
