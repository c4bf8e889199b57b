"""The composition root of training: builds every part of an engine in order, as straight-line code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.comm.collectives import Communicator
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.config.axes import Axes
from deepspeed.config.plan import Plan
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.runtime.accumulation import AccumulationClock
from deepspeed.runtime.loss_scaler import LossScaler
from deepspeed.runtime.optim.elementwise import is_elementwise
from deepspeed.runtime.optim.flags import set_optimizer_flags
from deepspeed.runtime.optim.registry import build_optimizer
from deepspeed.runtime.zero.access import StateAccess
from deepspeed.runtime.zero.bucket import ParamBucket, WeightPublisher
from deepspeed.runtime.zero.buffer_pool import BufferPool
from deepspeed.runtime.zero.client_state import ClientState, has_hooks
from deepspeed.runtime.zero.cutting import (
    TrainedParams,
    cut_sharded,
    cut_whole,
    param_specs,
    trained_params,
    with_frozen,
)
from deepspeed.runtime.zero.gathering.coordinator import LiveBudget
from deepspeed.runtime.zero.gathering.gather_rules import mark_leaves
from deepspeed.runtime.zero.gathering.param_storage import ParamStorage
from deepspeed.runtime.zero.gathering.sharded_bucket import ShardedBucket
from deepspeed.runtime.zero.gathering.sharded_model import ShardedModel
from deepspeed.runtime.zero.grad_bucket import GradBucket
from deepspeed.runtime.zero.gradient_sums import gradient_sum
from deepspeed.runtime.zero.late_params import LateParams
from deepspeed.runtime.zero.layout import NOBODY
from deepspeed.runtime.zero.offload.host_copies import HostCopies, off_host
from deepspeed.runtime.zero.offload.state_moves import StateMover
from deepspeed.runtime.zero.offload.tiers import ResidentTier, make_tier
from deepspeed.runtime.zero.optimizer import (
    BF16_Optimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    FP16_Optimizer,
    ZeroOptimizer,
)
from deepspeed.runtime.zero.params import full_numel, full_shape, is_zero_param
from deepspeed.runtime.zero.reducer import GradReducer
from deepspeed.runtime.zero.scopes import DENSE, Scopes, scope_name
from deepspeed.runtime.zero.sparse_grads import sparse_parameters
from deepspeed.runtime.zero.state_store import PARAMS, StateStore
from deepspeed.runtime.zero.step import StepExecutor, joins_ranks
from deepspeed.runtime.zero.whole_matrices import WholeMatrices

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCore:
    """Everything between ``backward`` and updated weights, and the optimizer object that clients see."""

    trained: TrainedParams
    param_buckets: list[ParamBucket]
    reducer: GradReducer
    store: StateStore
    scaler: LossScaler
    executor: StepExecutor
    access: StateAccess
    client_state: ClientState | None
    late_params: LateParams
    optimizer: ZeroOptimizer | torch.optim.Optimizer


def make_mesh(axes: Axes, mpu: Any = None, mesh_device: Any = None) -> ProcessMesh:
    """The mesh of this job: from the caller's groups if there are any, else as planned."""
    if mpu is not None:
        return ProcessMesh.from_mpu(mpu)
    if isinstance(mesh_device, ProcessMesh):
        return mesh_device
    if mesh_device is not None:
        return ProcessMesh.from_device_mesh(mesh_device)
    assert axes.layout is not None
    return ProcessMesh.from_layout(axes.layout)


def resolve_optimizer(
    config: DeepSpeedConfig,
    client: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    module: nn.Module,
) -> torch.optim.Optimizer | None:
    """The client's optimizer, the one its callable returns, the one the config names, or None."""
    if isinstance(client, torch.optim.Optimizer) or (client is not None and hasattr(client, "param_groups")):
        return client  # type: ignore[return-value]
    groups = _groups(model_parameters, module)
    if callable(client):
        return client(groups)
    if client is not None:
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or a callable, not {type(client).__name__}"
        )
    if config.optimizer_name is None or not groups:
        return None
    set_optimizer_flags(config, module)
    return build_optimizer(config.optimizer_name, config.optimizer_params, groups)


def _groups(model_parameters: Iterable[Any] | None, module: nn.Module) -> list[Any]:
    """Parameters or group dicts as a list; bare frozen parameters are left out, as nothing updates them."""
    given = list(model_parameters) if model_parameters is not None else list(module.parameters())
    return [entry for entry in given if isinstance(entry, dict) or entry.requires_grad]


def left_out(
    model_parameters: Iterable[Any] | None, module: nn.Module, optimizer: torch.optim.Optimizer
) -> list[nn.Parameter]:
    """Frozen parameters that would be in a configured optimizer's only group if they were trainable."""
    given = list(model_parameters) if model_parameters is not None else list(module.parameters())
    if len(optimizer.param_groups) > 1 or any(isinstance(entry, dict) for entry in given):
        return []
    return [param for param in given if not param.requires_grad]


def require_optimizer(plan: Plan, given: bool) -> None:
    if plan.zero.shard_state and not plan.zero.shard_params and not given:
        raise DeepSpeedConfigError(
            f"zero_optimization.stage={plan.zero.stage} requires an optimizer: pass optimizer= or model_parameters= to "
            "deepspeed.initialize with an 'optimizer' section in the config, or use stage 0."
        )


def check_optimizer(plan: Plan, optimizer: torch.optim.Optimizer, trained: TrainedParams) -> None:
    if not plan.zero.shard_state:
        return
    if not trained.params:
        raise DeepSpeedConfigError(
            f"zero_optimization.stage={plan.zero.stage} shards the state of trainable parameters, but the optimizer "
            "holds none with requires_grad=True; unfreeze some, or use stage 0."
        )
    whole = hasattr(optimizer, "segment_sum") or hasattr(optimizer, "whole_matrices")
    if plan.zero.allow_untested_optimizer or whole or is_elementwise(optimizer):
        return
    raise DeepSpeedConfigError(
        f"{type(optimizer).__name__} does not update elements independently, so zero_optimization.stage="
        f"{plan.zero.stage} cannot partition its tensors across ranks; use stage 0, or set "
        "zero_allow_untested_optimizer: true to try."
    )


def build_core(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    scopes: Scopes,
    clock: AccumulationClock,
    sharded: ShardedModel | None = None,
    spare: Sequence[nn.Parameter] = (),
) -> TrainingCore:
    """Wire the gradient path and the step. ``sharded``: the module's parameters, if stage 3 has partitioned them.
    ``spare``: frozen parameters that join the optimizer's group when they are unfrozen."""
    trained = trained_params(module, optimizer.param_groups)
    check_optimizer(plan, optimizer, trained)
    if sharded is None:
        layouts = cut_whole(param_specs(module, trained, plan), plan, scopes.shards())
        param_buckets = [
            ParamBucket(layout, trained.params, scopes[layout.scope].shard) for layout in layouts
        ]
        for bucket in param_buckets:
            bucket.flatten(flat=plan.state_offload is not None)
    else:
        param_buckets = list[ParamBucket](sharded.trained_buckets)
    device = trained.params[0].device if trained.params else torch.device("cpu")
    tier = make_tier(
        plan.state_offload,
        device,
        [bucket.layout for bucket in param_buckets],
        weights_swap=sharded.storage.swap if sharded is not None else None,
        elementwise=not joins_ranks(optimizer),
    )
    make_grads = partial(_grad_buckets, module, scopes=scopes, plan=plan, tier=tier)
    grad_buckets = make_grads(param_buckets)
    reducer = GradReducer(
        trained.params,
        grad_buckets,
        scopes.everyone,
        cadence=sharded.cadence if sharded is not None else plan.zero.cadence,
        overlap=plan.zero.overlap,
        expose=not plan.zero.shard_state,
        at_boundary=lambda: clock.at_boundary,
    )
    store = StateStore(
        optimizer, trained.params, param_buckets, grad_buckets, master_dtype=plan.precision.master, tier=tier
    )
    if plan.zero.shard_state and hasattr(optimizer, "whole_matrices"):
        optimizer.whole_matrices = WholeMatrices(store, scopes)  # type: ignore[attr-defined]
    scaler = LossScaler(plan.precision.loss_scale)
    publisher = WeightPublisher(param_buckets)
    executor = StepExecutor(plan, reducer, store, scaler, publisher, scopes, trained.names)
    executor.before_step += [
        copies.synchronize for copies in {b.host for b in grad_buckets} if copies is not None
    ]
    if sharded is not None:
        sharded.join_sums(reducer)
        executor.before_step.append(sharded.before_step)
        publisher.after.append(sharded.after_step)
    access = StateAccess(store, reducer, scaler, publisher, scopes, trained.names, trained.shared)
    make_late = partial(_late_buckets, module, plan, executor, make_grads, sharded=sharded is not None)
    late_params = executor.late_params = LateParams(module, executor, access, make_late, spare)
    if plan.zero.shard_state and hasattr(optimizer, "whole_matrices"):
        late_params.on_admit.append(
            lambda: setattr(optimizer, "whole_matrices", WholeMatrices(store, scopes))
        )
    reducer.install_hooks()
    return TrainingCore(
        trained=trained,
        param_buckets=param_buckets,
        reducer=reducer,
        store=store,
        scaler=scaler,
        executor=executor,
        access=access,
        client_state=ClientState(optimizer, access)
        if plan.wraps_optimizer and has_hooks(optimizer)
        else None,
        late_params=late_params,
        optimizer=_facade(plan, optimizer, executor, access, sharded),
    )


def shard_module(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan,
    config: DeepSpeedConfig,
    scopes: Scopes,
) -> ShardedModel:
    """Stage 3: shard every parameter of ``module`` and install the hooks that gather them around their use."""
    held = [p for group in (optimizer.param_groups if optimizer is not None else []) for p in group[PARAMS]]
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
            scopes[layout.scope].shard,
            everyone=scopes[layout.scope].everyone,
            persistent=persistent,
            keep=storage.keep_persistent if persistent else storage.keep,
        )
        for layout, persistent in cut_sharded(specs, zero, scopes.shards())
    ]
    known = {id(p) for p in held if p.requires_grad}
    return ShardedModel(
        module,
        buckets,
        scopes,
        trained={bucket.layout.index for bucket in buckets if any(id(p) in known for p in bucket.params)},
        budget=LiveBudget(max_live=int(zero.max_live_parameters), max_reuse=int(zero.max_reuse_distance)),
        prefetch_numel=int(zero.prefetch_bucket_size),
        storage=storage,
    )


def _grad_buckets(
    module: nn.Module,
    buckets: Sequence[ParamBucket],
    scopes: Scopes,
    plan: Plan,
    tier: ResidentTier,
) -> list[GradBucket]:
    by_rows = sparse_parameters(module) if plan.gradients.sparse else set()
    pool = BufferPool()
    copies = HostCopies(buckets[0].params[0].device) if plan.state_offload is not None and buckets else None
    result: list[GradBucket] = []
    for bucket in buckets:
        layout, first = bucket.layout, bucket.params[0]
        scope = scopes[layout.scope]
        first_holder = scope.first_replica if plan.zero.shard_state else scope.everyone.rank == 0
        result.append(
            GradBucket(
                layout,
                gradient_sum(layout, scope, pool, plan, full_shape(first) if first in by_rows else None),
                pool,
                first.device,
                rank=bucket.rank,
                factors=plan.gradients.factors(scope.divisor),
                counts=first_holder,
                accumulate_dtype=plan.precision.accumulate or layout.dtype,
                keep_local=not plan.zero.shard_grads,
                new_slice=partial(tier.of(layout).new_gradients, device=first.device),
                host=copies if off_host(first.device) and tier.takes(layout) else None,
            )
        )
    return result


def _late_buckets(
    module: nn.Module,
    plan: Plan,
    executor: StepExecutor,
    make_grads: Callable[[Sequence[ParamBucket]], list[GradBucket]],
    added: TrainedParams,
    first: int,
    *,
    sharded: bool,
) -> tuple[Sequence[ParamBucket], Sequence[GradBucket]]:
    """Buckets for parameters that start training later, numbered from ``first``."""
    store, reducer = executor.store, executor.reducer
    if sharded:
        weights = _renumber_homes(store, reducer, added, first)
    else:
        scopes = executor.scopes
        layouts = cut_whole(param_specs(module, added, plan), plan, scopes.shards())
        weights = [
            ParamBucket(
                layout.renumbered(lambda _, slot: first + slot.param, len(store.param_buckets) + i),
                [*store.params, *added.params],
                scopes[layout.scope].shard,
            )
            for i, layout in enumerate(layouts)
        ]
        for bucket in weights:
            bucket.flatten(flat=plan.state_offload is not None)
    known = {id(grads.layout): grads for grads in reducer.buckets}
    new = iter(make_grads([bucket for bucket in weights if id(bucket.layout) not in known]))
    grads = [known.get(id(bucket.layout)) or next(new) for bucket in weights]
    executor.before_step[:0] = [
        copies.synchronize for copies in {b.host for b in grads} if copies is not None
    ]
    return weights, grads


def _renumber_homes(
    store: StateStore, reducer: GradReducer, added: TrainedParams, first: int
) -> list[ParamBucket]:
    """Stage 3: the buckets exist, but number the parameters differently or not at all."""
    number = {id(param): index for index, param in enumerate(added.params, first)}
    homes: dict[int, ParamBucket] = {id(p.ds_home): p.ds_home for p in added.params}  # type: ignore[attr-defined]
    for home in homes.values():
        trained = home in store.param_buckets
        old, params = home.layout, home.params
        home.renumber(
            old.renumbered(
                lambda i, slot, params=params, trained=trained: number.get(
                    id(params[i]), slot.param if trained else NOBODY
                )
            )
        )
        for grads in reducer.buckets:
            if grads.layout is old:
                grads.layout = home.layout
    return sorted(homes.values(), key=lambda home: home.layout.index)


def _facade(
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    executor: StepExecutor,
    access: StateAccess,
    sharded: ShardedModel | None,
) -> ZeroOptimizer | torch.optim.Optimizer:
    if not plan.wraps_optimizer:
        return optimizer
    mover = StateMover(executor.store, executor.reducer.buckets)
    if sharded is not None:
        return DeepSpeedZeroOptimizer_Stage3(optimizer, executor, access, mover, sharded.offload)
    if plan.zero.shard_state:
        return DeepSpeedZeroOptimizer(optimizer, executor, access, mover)
    kind = BF16_Optimizer if plan.precision.param is torch.bfloat16 else FP16_Optimizer
    return kind(optimizer, executor, access, mover)


def broadcast_weights(module: nn.Module, scopes: Scopes) -> None:
    """Every rank starts from the weights of the first rank that holds the same ones, and from the buffers of the first
    rank: one flat broadcast per scope and dtype."""
    by_scope: dict[str, list[torch.Tensor]] = {DENSE: list(module.buffers())}
    for param in module.parameters():
        if not is_zero_param(param):  # those sharded by zero.Init came from the first rank already
            by_scope.setdefault(scope_name(param), []).append(param.data)
    for name, tensors in sorted(by_scope.items()):
        if scopes[name].everyone.size > 1:
            _broadcast(tensors, scopes[name].everyone)


def _broadcast(tensors: Iterable[torch.Tensor], communicator: Communicator) -> None:
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for group in by_kind.values():
            for batch in _batches(group, 16 * 1024 * 1024):
                flat = torch.cat([t.reshape(-1) for t in batch])
                communicator.broadcast(flat.view(torch.uint8), src=0).wait()
                if communicator.rank:
                    for tensor, value in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                        tensor.copy_(value.view(tensor.shape))


def _batches(tensors: Sequence[torch.Tensor], numel: int) -> Iterable[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.numel() > numel:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.numel()
    if batch:
        yield batch


def check_ranks_agree(module: nn.Module, communicator: Communicator) -> None:
    """Require that all ranks built the same model with the same frozen parameters; says which rank differs and how."""
    if communicator.size == 1:
        return
    params = list(module.parameters())
    counts = [len(params), sum(map(full_numel, params)), sum(p.requires_grad for p in params)]
    device = params[0].device if params else torch.device("cpu")
    extremes = torch.tensor([*counts, *(-count for count in counts)], dtype=torch.int64, device=device)
    communicator.all_reduce_max(extremes).wait()
    highest, lowest = extremes.view(2, -1).tolist()
    if highest == [-value for value in lowest]:
        return
    every = torch.empty(len(counts) * communicator.size, dtype=torch.int64, device=device)
    communicator.all_gather(every, torch.tensor(counts, dtype=torch.int64, device=device)).wait()
    rows = every.view(-1, len(counts)).tolist()
    listing = "; ".join(
        f"rank {r}: {n} parameters, {e} elements, {t} trainable" for r, (n, e, t) in enumerate(rows)
    )
    raise RuntimeError(
        f"ranks disagree on the model ({listing}); build the same model with the same frozen parameters on every rank."
    )
