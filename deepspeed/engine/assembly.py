"""Build the training core of an engine: everything between gradients and updated weights.

The order of the whole start is in ``DeepSpeedEngine.__init__``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.comm.mesh import ProcessMesh
from deepspeed.config.axes import Axes
from deepspeed.config.plan import Plan
from deepspeed.engine.misuse import StepWarnings
from deepspeed.engine.optimizer import (
    check_made_for_host,
    check_membership,
    check_optimizer,
    find_unfreezable,
    require_trainable,
    resolve_optimizer,
)
from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam
from deepspeed.ops.update import traits_of
from deepspeed.optim.loss_scaler import LossScaler
from deepspeed.transforms.recompute.scope import PROCESS, RecomputeSettings
from deepspeed.zero.accumulation import AccumulationClock
from deepspeed.zero.bucket import BufferPool, ParamBucket, WeightPublisher
from deepspeed.zero.gradients.bucket import GradBucket
from deepspeed.zero.gradients.factory import make_grad_buckets, make_reducer
from deepspeed.zero.gradients.reducer import GradReducer
from deepspeed.zero.layout import UNUSED
from deepspeed.zero.offload.host_copies import HostCopies
from deepspeed.zero.offload.state_moves import StateMover
from deepspeed.zero.optimizer import (
    BF16_Optimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    FusedMasters,
    ShardedBF16Optimizer,
    UnfusedMasters,
    ZeroOptimizer,
)
from deepspeed.zero.optimizer_registry import set_state_dtype
from deepspeed.zero.partitioning import (
    TrainedParams,
    cut_whole,
    param_specs,
    sparse_parameters,
    stepped_by_rows,
    trained_params,
)
from deepspeed.zero.pending_params import PendingParams
from deepspeed.zero.replica_groups import ReplicaGroups
from deepspeed.zero.states.access import StateAccess
from deepspeed.zero.states.client_state import ClientState, has_hooks
from deepspeed.zero.states.rank_state import RankState
from deepspeed.zero.states.store import ResidentTier, StateStore
from deepspeed.zero.step import StepExecutor

if TYPE_CHECKING:
    from deepspeed.config.deepspeed_config import DeepSpeedConfig
    from deepspeed.zero.gathering.sharded_model import ShardedModel
    from deepspeed.zero.offload.speculation import Speculation
    from deepspeed.zero.offload.zenflow import ZenFlow


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCore:
    """The objects between ``backward`` and updated weights, and the optimizer that clients see."""

    trained: TrainedParams
    param_buckets: list[ParamBucket]
    reducer: GradReducer
    store: StateStore
    scaler: LossScaler
    executor: StepExecutor
    access: StateAccess
    own_state: RankState | ZenFlow
    client_state: ClientState | None
    pending_params: PendingParams
    optimizer: ZeroOptimizer | torch.optim.Optimizer
    step_warnings: StepWarnings

    def close(self, *, own_weights: bool) -> None:
        """Stop updates and their threads, and return the state to the client's optimizer; ``own_weights``: also
        unflatten every parameter into separate memory (at stage 3 the sharded model does)."""
        self.step_warnings.remove()
        self.executor.close()
        if self.client_state is not None:
            self.client_state.release(self.store.optimizer)
        self.store.tier.close()
        for param in self.store.params:
            if vars(param).get("_ds_state_access") is self.access:  # not a newer engine's
                del param._ds_state_access  # type: ignore[attr-defined]
        if own_weights:
            for bucket in self.store.param_buckets:
                bucket.destroy()


def make_mesh(axes: Axes, mpu: Any = None, mesh_device: Any = None) -> ProcessMesh:
    """Return the mesh of this job: from the caller's mpu or mesh if given, else as planned."""
    if mpu is not None:
        return ProcessMesh.from_mpu(mpu)
    if isinstance(mesh_device, ProcessMesh):
        return mesh_device
    if mesh_device is not None:
        return ProcessMesh.from_device_mesh(mesh_device)
    assert axes.layout is not None
    return ProcessMesh.from_layout(axes.layout)


def build_training(
    module: nn.Module,
    client: Any,
    model_parameters: list[Any] | None,
    config: DeepSpeedConfig,
    plan: Plan,
    replica_groups: ReplicaGroups,
    clock: AccumulationClock,
    backward: Callable[..., Any],
) -> tuple[torch.optim.Optimizer | None, Any, TrainingCore | None, ShardedModel | None]:
    """Build the optimizer and everything between gradients and updated weights.

    Returns the base optimizer (the client's or the config's), the object to expose as ``engine.optimizer``, the core
    (all None if nothing is trained; at stage 3 the second is the parameter offload), and at stage 3 the sharded
    model.

    Args:
        client: an optimizer, a callable that makes one from ``model_parameters``, or None for the config's.
        model_parameters: parameters or groups to train; None: those of ``module``.
        backward: bound method of the engine for ``optimizer.backward(loss)``; held as a weak reference.

    Raises:
        DeepSpeedConfigError, ValueError, TypeError: the optimizer does not fit the module or the plan.
    """
    basic = resolve_optimizer(config, plan, client, model_parameters, module)
    require_trainable(plan, basic)
    if basic is not None:
        check_membership(basic, module)
    if client is not None:
        check_made_for_host(basic, plan)
    elif basic is not None:
        set_state_dtype(basic, plan.precision.state)
    # Shard parameters before making gradient buckets, which follow the shards.
    sharded: ShardedModel | None = None
    if plan.zero.shard_params:
        from deepspeed.zero.gathering.sharded_model import shard_module

        sharded = shard_module(module, basic, plan, config, replica_groups)
    if basic is None:
        return None, sharded.offload if sharded is not None else None, None, sharded
    has_groups = hasattr(client, "param_groups")  # its own choice; a callable's are those of what it is given
    unfreezable = [] if has_groups else find_unfreezable(model_parameters, module, basic)
    core = CoreBuilder(module, basic, plan, replica_groups, clock, sharded).core(unfreezable)
    if isinstance(core.optimizer, ZeroOptimizer):
        core.optimizer.clock = clock
        core.optimizer.differentiate = weakref.WeakMethod(backward)
        core.optimizer.allgather_bucket_size = int(config.zero_config.allgather_bucket_size)
        core.optimizer.before_direct_step = core.step_warnings.before_direct_step
    return basic, core.optimizer, core, sharded


def recompute_settings(
    config: DeepSpeedConfig, mpu: Any, network: Any, tensor_ranks: Any
) -> RecomputeSettings:
    """Return the recomputation settings: the engine's own if its config has the section, else the process's."""
    if not config.activation_checkpointing_config.model_fields_set:
        return PROCESS
    from deepspeed.transforms.recompute import checkpointing

    return checkpointing.settings_for(config, mpu, network, tensor_ranks)


class CoreBuilder:
    """Wires the training core of one engine. ``sharded``: the sharded model at stage 3.

    Imports needed by some plans only are made on demand.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        replica_groups: ReplicaGroups,
        clock: AccumulationClock,
        sharded: ShardedModel | None,
    ) -> None:
        """Wire the gradient path: buckets, their sums, and the store."""
        self.module, self.optimizer, self.plan = module, optimizer, plan
        self.replica_groups, self.clock, self.sharded = replica_groups, clock, sharded
        self.traits = traits_of(optimizer)
        self.trained = trained = trained_params(module, optimizer.param_groups)
        check_optimizer(plan, optimizer, trained, module)
        weights = self._whole_buckets(trained) if sharded is None else list(sharded.trained_buckets)
        device = next((p.device for p in (*trained.params, *module.parameters())), torch.device("cpu"))
        tier = self._tier(weights, device)
        # ZenFlow accumulates gradients on the device and copies them to the host once per round.
        self.host = HostCopies(device) if plan.state_offload is not None and plan.zenflow is None else None
        self.speculation = self._speculation()
        self.make_grads = partial(
            make_grad_buckets,
            plan=plan,
            replica_groups=replica_groups,
            pool=BufferPool(),
            tier=tier if plan.zenflow is None else ResidentTier(),
            by_rows=sparse_parameters(module) if plan.gradients.sparse else set(),
            host=self.host,
            make=self._bucket_class(),
        )
        grads = self.make_grads(weights)
        self.reducer = make_reducer(
            trained.params,
            grads,
            plan,
            replica_groups.all_ranks,
            sharded.coordinator if sharded is not None else None,
            at_boundary=lambda: clock.at_boundary,
            layers_exchange=replica_groups.layers_exchange,
        )
        self.store = StateStore(
            optimizer, trained.params, weights, grads, master_dtype=plan.precision.master, tier=tier
        )
        self.step_warnings = StepWarnings(optimizer, clock)

    def core(self, unfreezable: Sequence[nn.Parameter]) -> TrainingCore:
        """Wire the path from summed gradients to published weights, and access to the state in between.
        ``unfreezable``: frozen parameters that join the optimizer's group when they are unfrozen."""
        plan, reducer, store, trained = self.plan, self.reducer, self.store, self.trained
        before_step = [self.host.synchronize] if self.host is not None else []
        if store.tier.on_file:
            before_step.append(store.tier.check)
        after_publish = []
        if self.sharded is not None:
            before_step.append(self.sharded.before_step)
            after_publish.append(self.sharded.after_step)
        scaler = LossScaler(plan.precision.loss_scale)
        publisher = WeightPublisher(store.param_buckets, after_publish)
        access = StateAccess(
            store, reducer, scaler, publisher, self.replica_groups, trained.names, trained.shared
        )
        pending_params = PendingParams(
            self.module, plan, reducer, store, publisher, access, self._pending_buckets, unfreezable
        )
        executor = self._executor_class()(
            plan,
            reducer,
            store,
            scaler,
            publisher,
            self.replica_groups,
            trained.names,
            pending_params,
            before_step,
            stepped_by_rows(self.module, self.optimizer),
        )
        observed = plan.wraps_optimizer and has_hooks(self.optimizer)
        core = TrainingCore(
            trained=trained,
            param_buckets=store.param_buckets,
            reducer=reducer,
            store=store,
            scaler=scaler,
            executor=executor,
            access=access,
            own_state=self._own_state(executor, access),
            client_state=ClientState(self.optimizer, access) if observed else None,
            pending_params=pending_params,
            optimizer=self._exposed_optimizer(executor, access),
            step_warnings=self.step_warnings,
        )
        reducer.install_hooks()
        return core

    def _tier(self, weights: Sequence[ParamBucket], device: torch.device) -> ResidentTier:
        """Make the tier of master weights and optimizer state."""
        if self.plan.state_offload is None:
            return ResidentTier()
        from deepspeed.zero.offload.tiers import make_tier

        return make_tier(
            self.plan.state_offload,
            device,
            [bucket.layout for bucket in weights],
            weights_swap=self.sharded.storage.swap if self.sharded is not None else None,
            elementwise=not self.traits.joins_ranks,
            grain=self.traits.grain,
        )

    def _speculation(self) -> Speculation | None:
        offload, clock = self.plan.state_offload, self.clock
        if offload is None or not offload.speculate:
            return None
        from deepspeed.zero.offload.speculation import make_speculation

        return make_speculation(self.optimizer, lambda: clock.at_boundary, offload.cores)

    def _bucket_class(self) -> Callable[..., GradBucket]:
        if self.speculation is None:
            return GradBucket
        from deepspeed.zero.offload.speculation import SpeculativeBucket

        return partial(SpeculativeBucket, speculation=self.speculation)

    def _executor_class(self) -> Callable[..., StepExecutor]:
        if self.speculation is not None:
            from deepspeed.zero.offload.speculation import SpeculativeStepExecutor

            return partial(SpeculativeStepExecutor, speculation=self.speculation)
        if self.plan.zenflow is not None:
            from deepspeed.zero.offload.zenflow import ZenFlowStepExecutor

            return ZenFlowStepExecutor
        return StepExecutor

    def _own_state(self, executor: StepExecutor, access: StateAccess) -> RankState | ZenFlow:
        if self.plan.zenflow is None:
            return RankState(access)
        from deepspeed.zero.offload.zenflow import ZenFlowStepExecutor

        assert isinstance(executor, ZenFlowStepExecutor)
        return executor.zenflow

    def _whole_buckets(
        self, added: TrainedParams, known: Sequence[nn.Parameter] = (), first: int = 0
    ) -> list[ParamBucket]:
        """Make the buckets for ``added`` at stages 0 to 2, numbered from ``first``, after the parameters ``known``."""
        specs = param_specs(self.module, added, self.plan)
        layouts = cut_whole(specs, self.plan, self.replica_groups.shards(), self.traits.grain)
        buckets = [
            ParamBucket(
                layout.renumbered(lambda _, slot: len(known) + slot.param, first + i) if known else layout,
                [*known, *added.params],
                self.replica_groups[layout.replica_group].shard,
            )
            for i, layout in enumerate(layouts)
        ]
        for bucket in buckets:
            bucket.flatten(flat=self.plan.state_offload is not None)
        return buckets

    def _pending_buckets(self, added: TrainedParams) -> tuple[Sequence[ParamBucket], Sequence[GradBucket]]:
        """Make buckets for parameters that join training later, numbered after those of the store."""
        store = self.store
        if self.sharded is not None:
            weights = _renumber_owners(store, self.reducer, added)
        else:
            weights = self._whole_buckets(added, store.params, len(store.param_buckets))
        known = {id(grads.layout): grads for grads in self.reducer.buckets}
        new = iter(self.make_grads([bucket for bucket in weights if id(bucket.layout) not in known]))
        return weights, [known.get(id(bucket.layout)) or next(new) for bucket in weights]

    def _exposed_optimizer(
        self, executor: StepExecutor, access: StateAccess
    ) -> ZeroOptimizer | torch.optim.Optimizer:
        plan, optimizer, sharded = self.plan, self.optimizer, self.sharded
        if not plan.wraps_optimizer:
            return optimizer
        weights = self.store.param_buckets if sharded is None else sharded.buckets
        mover = StateMover(weights, self.reducer.buckets, self.store)
        if sharded is not None:
            kind = DeepSpeedZeroOptimizer_Stage3
            if self.speculation is not None:
                from deepspeed.zero.offload.superoffload_optimizer import SuperOffloadOptimizer_Stage3

                kind = SuperOffloadOptimizer_Stage3
            elif sharded.replica_groups.mics_shard_size > 0:
                from deepspeed.zero.mics import MiCS_Optimizer

                kind = MiCS_Optimizer
            sharded.offload.mover = mover  # one owner of offloaded states
            return kind(optimizer, executor, access, mover, sharded.offload)
        if plan.zero.shard_state:
            if plan.zenflow is not None:
                from deepspeed.zero.offload.zenflow_optimizer import (
                    ZenFlowZeroOptimizerParallel,
                    ZenFlowZeroOptimizerSequential,
                )

                parallel = plan.zenflow.overlap
                variant = ZenFlowZeroOptimizerParallel if parallel else ZenFlowZeroOptimizerSequential
                return variant(optimizer, executor, access, mover)
            sums_in_fp32 = (plan.precision.param, plan.precision.accumulate) == (
                torch.bfloat16,
                torch.float32,
            )
            on_device = not plan.zero.shard_grads and plan.state_offload is None
            kind = ShardedBF16Optimizer if sums_in_fp32 and on_device else DeepSpeedZeroOptimizer
            return kind(optimizer, executor, access, mover)
        return _stage_0_kind(plan, optimizer)(optimizer, executor, access, mover)


def _renumber_owners(store: StateStore, reducer: GradReducer, added: TrainedParams) -> list[ParamBucket]:
    """Renumber existing stage-3 buckets, whose parameters have other numbers or none; return them in order."""
    number = {id(param): index for index, param in enumerate(added.params, len(store.params))}
    owners: dict[int, ParamBucket] = {id(p.ds_owner): p.ds_owner for p in added.params}  # type: ignore[attr-defined]
    for owner in owners.values():
        trained = owner in store.param_buckets
        old, params = owner.layout, owner.params
        owner.renumber(
            old.renumbered(
                lambda i, slot, params=params, trained=trained: number.get(
                    id(params[i]), slot.param if trained else UNUSED
                )
            )
        )
        for grads in reducer.buckets:
            if grads.layout is old:
                grads.layout = owner.layout
    return sorted(owners.values(), key=lambda owner: owner.layout.index)


def _stage_0_kind(plan: Plan, optimizer: torch.optim.Optimizer) -> type[ZeroOptimizer]:
    """Return the documented class of stage 0; the classes differ only in name, which clients check."""
    precision = plan.precision
    adam = isinstance(optimizer, MultiTensorAdam)
    if precision.param is torch.bfloat16 and (
        precision.accumulate is torch.float32 or (adam and precision.accumulate is None)
    ):
        return BF16_Optimizer
    return FusedMasters if adam else UnfusedMasters
