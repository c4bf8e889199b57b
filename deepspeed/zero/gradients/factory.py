"""Make the gradient buckets, their wire formats and the reducer that a plan asks for.

``engine/assembly.py`` passes real ranks and memory; ``planning/rehearsal.py`` passes ranks that answer at once and
memory that is only counted. So what is planned is what is built.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepspeed.base.sharded import full_shape
from deepspeed.comm.collectives import Communicator
from deepspeed.config.plan import Cadence, Plan
from deepspeed.zero.bucket import BufferPool, ParamBucket
from deepspeed.zero.gradients.bucket import GradBucket
from deepspeed.zero.gradients.reducer import GradReducer
from deepspeed.zero.gradients.sums import DenseSum, GradientSum, GroupSum, LocalSum, ReplicatedSum, RowSum
from deepspeed.zero.layout import BucketLayout
from deepspeed.zero.offload.host_copies import HostCopies, has_own_memory
from deepspeed.zero.replica_groups import ReplicaGroup, ReplicaGroupTable
from deepspeed.zero.states.store import ResidentTier

if TYPE_CHECKING:
    from deepspeed.zero.gathering.coordinator import ParamCoordinator


def make_grad_buckets(
    buckets: Sequence[ParamBucket],
    plan: Plan,
    replica_groups: ReplicaGroupTable,
    *,
    pool: BufferPool,
    tier: ResidentTier,
    by_rows: Container[nn.Parameter] = (),
    host: HostCopies | None = None,
    make: Callable[..., GradBucket] = GradBucket,
) -> list[GradBucket]:
    """Make a gradient bucket for each bucket of weights, on the device of its first parameter.

    Args:
        pool: lends the buffers that live for one round.
        tier: where optimizer states rest; the gradients of offloaded states leave the device through ``host``.
        make: called with the arguments of ``GradBucket``.
        by_rows: embeddings of whose gradients only the touched rows travel; each is alone in its bucket.
    """
    result: list[GradBucket] = []
    for bucket in buckets:
        layout, first = bucket.layout, bucket.params[0]
        replica_group = replica_groups[layout.replica_group]
        first_holder = replica_group.first_replica if plan.zero.shard_state else replica_group.first_holder
        rows_of = full_shape(first) if first in by_rows else None
        kept_by = tier.of(layout)
        result.append(
            make(
                layout,
                [full_shape(param) for param in bucket.params],
                gradient_sum(layout, replica_group, pool, plan, rows_of),
                pool,
                first.device,
                rank=bucket.rank,
                local_format=local_sum(layout, replica_group, pool, plan),
                factors=plan.gradients.factors(replica_group.divisor),
                counts_in_norm=first_holder,
                dtype=plan.precision.accumulate or layout.dtype,
                keep_local=not plan.zero.shard_grads,
                new_shard=partial(kept_by.new_gradients, device=first.device),
                host=host if has_own_memory(first.device) and tier.offloads(layout) else None,
                check=kept_by.check if kept_by.on_file and not has_own_memory(first.device) else None,
            )
        )
    return result


def gradient_sum(
    layout: BucketLayout,
    replica_group: ReplicaGroup,
    pool: BufferPool,
    plan: Plan,
    rows_of: torch.Size | None = None,
) -> GradientSum:
    """Return the wire format of one bucket. ``rows_of``: shape of the embedding that is alone in it, if only its
    touched rows travel."""
    result = _group_sum(layout, replica_group, pool, plan)
    for wrap in plan.gradients.formats:
        result = wrap(result)
    if rows_of is not None:
        result = RowSum(result, layout, replica_group.shard, rows_of)
    if replica_group.replicas.size > 1:
        result = ReplicatedSum(result, replica_group.replicas)
    return result


def local_sum(
    layout: BucketLayout, replica_group: ReplicaGroup, pool: BufferPool, plan: Plan
) -> GradientSum | None:
    """Return the format of one bucket for steps without a sum over all ranks; None: each of its shards has a single
    owner."""
    if not plan.zero.shard_state:
        return LocalSum(replica_group.all_ranks.size)
    if plan.zero.shard_params or not (plan.zero.in_groups or replica_group.shard.size == 1):
        return None
    return GroupSum(_group_sum(layout, replica_group, pool, plan), replica_group.replicas.size)


def _group_sum(
    layout: BucketLayout, replica_group: ReplicaGroup, pool: BufferPool, plan: Plan
) -> GradientSum:
    """Return the format of the sum over the ranks that share one copy of the states."""
    if plan.packing.codec is not None or plan.packing.gradients:
        from deepspeed.zero.gradients.quantized_sum import encoded_sum

        if (encoded := encoded_sum(layout, replica_group, plan)) is not None:
            return encoded
    return DenseSum(layout, replica_group.shard, pool, scatter=plan.zero.reduce_scatter)


def make_reducer(
    params: Sequence[nn.Parameter],
    buckets: Sequence[GradBucket],
    plan: Plan,
    all_ranks: Communicator,
    coordinator: ParamCoordinator | None,
    *,
    at_boundary: Callable[[], bool],
    layers_exchange: bool = False,
    device: torch.device | None = None,
) -> GradReducer:
    """Make the reducer; the caller installs its hooks.

    Args:
        coordinator: of the parameters, where stage 3 has sharded them.
        layers_exchange: see ``GradReducer``.
        device: where messages about gradients are built; default: where the gradients are.
    """
    turns = coordinator.gatherer.turns if coordinator is not None else None
    reducer = GradReducer(
        list(params),
        list(buckets),
        all_ranks,
        cadence=cadence(plan, coordinator),
        overlap=plan.zero.overlap,
        expose=not plan.zero.shard_state,
        at_boundary=at_boundary,
        turns=turns,
        layers_exchange=layers_exchange,
        message_device=device,
    )
    if turns is not None:
        turns.start_sum = reducer.launch
    return reducer


def cadence(plan: Plan, coordinator: ParamCoordinator | None) -> Cadence:
    """Choose how often gradients are summed. If stage 3 has room for every parameter, it also has room for whole
    gradients between micro-batches, so each is summed only once per step."""
    if coordinator is None:
        return plan.zero.cadence
    return Cadence.AT_BOUNDARY if coordinator.fits_budget else Cadence.EVERY_MICRO_BATCH
