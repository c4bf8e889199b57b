"""The training engine: construction, then ``forward``, ``backward`` and ``step``. Everything else is in its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed import comm as dist
from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.events import Events
from deepspeed.base.logging import apply_log_level
from deepspeed.base.tracing import inside_transform
from deepspeed.comm.collectives import CommunicationError
from deepspeed.comm.init import get_local_rank, network_of
from deepspeed.comm.mesh import meshes
from deepspeed.config.constants import ROUTE_EVAL, ROUTE_TRAIN  # noqa: F401 - clients import it from here
from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.config.plan import Plan, make_plan
from deepspeed.engine import module as modules
from deepspeed.engine.assembly import TrainingCore, build_training, make_mesh, recompute_settings
from deepspeed.engine.load_guard import LoadGuard
from deepspeed.engine.misuse import warn_of_misuse
from deepspeed.engine.observers.attach import ObserverAttributes, attach_observers
from deepspeed.engine.observers.progress.start_report import log_start
from deepspeed.engine.optimizer import list_parameters, no_training, require_optimizer
from deepspeed.engine.parts.accumulation import (
    MEMORY_OPT_ALLREDUCE_SIZE,  # noqa: F401 - clients import it from here
    Accumulation,
    SparseSums,
    ZeroGrads,
)
from deepspeed.engine.parts.compiling import Compilation
from deepspeed.engine.parts.data import EngineData
from deepspeed.engine.parts.facts import EngineFacts
from deepspeed.engine.parts.state import Checkpoints, StateMoves
from deepspeed.engine.surface import EngineSurface
from deepspeed.optim.scheduler_choice import advance, resolve_scheduler
from deepspeed.parallel.selection import from_config
from deepspeed.planning.memory_check import check_fits, write_model_info_if_tuning
from deepspeed.planning.run_spec import RunSpec
from deepspeed.transforms.recompute import scope as recompute_scope
from deepspeed.transforms.record import transforms_of
from deepspeed.zero.accumulation import AccumulationClock
from deepspeed.zero.gradients.backward import (
    PlainBackward,
    at_least_fp32,
    check_graph,
    check_scalar,
    loss_scale_correction,
    scaled_loss,
)
from deepspeed.zero.params import gather_permanently
from deepspeed.zero.precision import autocast_context, cast_inputs
from deepspeed.zero.replica_groups import broadcast_weights, check_ranks_agree

if TYPE_CHECKING:
    from deepspeed.data.loader import DeepSpeedDataLoader

DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]


class DeepSpeedEngine(EngineSurface, ObserverAttributes, nn.Module):
    """A module with its optimizer, trained over all data-parallel ranks as configured.

    ``config_class``: a parsed config, in place of ``config``; ``mesh_device``: a torch DeviceMesh of the ranks;
    ``dont_change_device``: keep the module on its device. Attribute access falls through to the module. Other methods
    are in ``engine/surface.py``; the path of gradients is in ``docs/life_of_a_step.md``.
    """

    module: nn.Module
    torch_autocast_z0_gradscaler: Any = None  # the engine's own loss scaler also serves autocast
    experts_of_stages: frozenset[str] = frozenset()  # names of the expert groups on all pipeline stages
    _destroyed = False

    def __init__(
        self,
        args: Any,
        model: nn.Module,
        optimizer: Optimizer | DeepSpeedOptimizerCallable | None = None,
        model_parameters: Any = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        mpu: Any = None,
        dist_init_required: bool | None = None,
        collate_fn: Callable[..., Any] | None = None,
        config: Any = None,
        config_class: DeepSpeedConfig | None = None,
        mesh_device: Any = None,
        dont_change_device: bool = False,
    ) -> None:
        super().__init__()
        # The plan comes first: everything else reads it.
        self.config = config
        self._config = config_class or DeepSpeedConfig(
            config, mpu, mesh_device, clients=(optimizer, lr_scheduler)
        )
        apply_log_level(self._config.log_level)
        self.plan: Plan = make_plan(self._config)
        # Then the ranks: the module is transformed and sharded by this rank's mesh coordinates.
        dist.init_distributed(dist_init_required=dist_init_required)
        self.mpu = mpu
        self._init_mesh_and_ranks(args, mesh_device)
        self.device = modules.choose_device(model, self.local_rank, keep=dont_change_device)
        # Clock, events and counters exist before their users and subscribers.
        self._init_counters()
        self._create_parts()
        # Invalid arguments are refused before the module is changed.
        require_optimizer(self.plan, optimizer is not None or self._config.optimizer_name is not None)
        modules.require_module(model)
        model_parameters = list_parameters(model_parameters)
        # Transforms replace layers and parameters, so they precede everything that reads these.
        model_parameters = self._transform_module(model, optimizer, model_parameters)
        modules.check_module(model)
        if not self.plan.zero.shard_params:
            gather_permanently(model)
        # Memory is checked before any of it is allocated on the device.
        self._check_memory(model, optimizer, model_parameters)
        # Masters and buckets copy the weights: by then these are on the device, in their dtype, equal on all ranks.
        self._prepare_module(model, None if dont_change_device else self.device)
        self._build_training(optimizer, model_parameters)
        # The schedule sets rates in the optimizer's groups, and a loader of variable batches wraps the schedule.
        self.client_lr_scheduler = lr_scheduler
        self.lr_scheduler = resolve_scheduler(self._config, lr_scheduler, self.basic_optimizer, optimizer)
        self.collate_fn = collate_fn
        self.training_dataloader = self._make_dataloader(training_data) if training_data is not None else None
        self.background_writer = self.checkpoints.new_writer()
        # Observers come last: they read all of the above, and the start report describes it.
        attach_observers(self)
        warn_of_misuse(self)
        log_start(self)

    def _init_mesh_and_ranks(self, args: Any, mesh_device: Any) -> None:
        """Set the mesh, ranks and world sizes."""
        self._network = network_of(self._config)
        self.mesh = make_mesh(self.plan.axes, self.mpu, mesh_device).in_network(self._network)
        self.mesh.data_before_experts = self._config.use_data_before_expert_parallel_
        meshes.follow(self.mesh)
        shared = self.mesh.communicator("tp") if self.mpu is None and self.mesh.size("tp") > 1 else None
        self._checkpointing = recompute_settings(self._config, self.mpu, self._network, shared)
        self.accelerator = get_accelerator()
        given = getattr(args, "local_rank", None)  # OmegaConf returns None for missing keys
        self.local_rank = int(given) if given is not None and int(given) >= 0 else get_local_rank()
        self.global_rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self.dp_world_size = self.mesh.size("dp")  # ranks with different data
        self.seq_dp_world_size = self.mesh.size("dp", "sp")  # ranks that sum gradients and share state
        self.mp_world_size = self.mesh.size("tp")

    def _init_counters(self) -> None:
        """Initialize the clock, the events and the counters."""
        self.clock = AccumulationClock(
            self._config.gradient_accumulation_steps, managed=self.plan.managed_accumulation
        )
        self.events = Events()
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        # Documented attributes:
        self.losses: Tensor | float = 0.0
        self.warn_unscaled_loss = True
        self.enable_backward_allreduce = True
        self.pipeline_parallelism = False

    def _create_parts(self) -> None:
        """Create the parts, which read the rest of the engine on use."""
        self.facts = EngineFacts(self)
        self.accumulation = Accumulation(self)
        self.zero_grads = ZeroGrads(self)
        self.compilation = Compilation(self)
        self.checkpoints = Checkpoints(self)
        self.moves = StateMoves(self)
        self.sparse_sums = SparseSums(self)
        self.load_guard = LoadGuard(self.events)
        self._plain_backward = PlainBackward(self._begin_plain_backward, self._end_plain_backward)
        self.checkpointed_observers: dict[str, Any] = {}
        """Observers whose ``state_dict`` of plain numbers goes into checkpoints."""

    def _transform_module(
        self, model: nn.Module, optimizer: Any, model_parameters: list[Any] | None
    ) -> list[Any] | None:
        """Apply the transforms that the config and the module request, before anything is moved or sharded. Return
        the parameters to train; a client's optimizer is updated in place."""
        asked, self.module_transforms = from_config(self._config), transforms_of(model)
        if asked or self.module_transforms.requested:
            from deepspeed.transforms.module_transforms import transform_module

            self.module_transforms = transform_module(model, self.plan, self._config, self.mesh, asked)
        else:
            self.module_transforms.record_no_op()
        self.data = EngineData(self, self.module_transforms.inputs)
        self.module_transforms.successors.replace_in_optimizer(optimizer)
        return self.module_transforms.successors.replace_in_parameters(model_parameters)

    def _check_memory(self, model: nn.Module, optimizer: Any, model_parameters: list[Any] | None) -> None:
        """Raise MemoryPlanError if the model states cannot fit; in an autotuner run, write the memory need of each
        stage."""
        run = RunSpec(
            module=model,
            plan=self.plan,
            config=self._config,
            mesh=self.mesh,
            optimizer=optimizer,
            model_parameters=model_parameters,
        )
        write_model_info_if_tuning(run)
        check_fits(run)

    def _prepare_module(self, model: nn.Module, device: torch.device | None) -> None:
        """Move the module to ``device`` (None: keep), cast it to the plan's dtypes, and broadcast its weights."""
        self.num_experts, self.has_moe_layers = modules.prepare_module(model, self.plan, self.mesh, device)
        self.module = model
        self._checkpointing.keep_layers(model)
        mics_shard_size = int(self._config.zero_config.mics_shard_size)
        self.replica_groups = modules.find_replica_groups(model, self.plan, self.mesh, mics_shard_size)
        check_ranks_agree(model, self.replica_groups.all_ranks)
        self._broadcast_model()
        self.zero_grads.patch_module()

    def _broadcast_model(self) -> None:
        """Broadcast the weights; replaced by trainers whose weights are already equal on all ranks."""
        broadcast_weights(self.module, self.replica_groups)

    def _build_training(self, optimizer: Any, params: list[Any] | None) -> None:
        """Build the optimizer and everything between gradients and updated weights."""
        self.client_optimizer = optimizer
        self.basic_optimizer, self.optimizer, self.core, self.sharded = build_training(
            self.module,
            optimizer,
            params,
            self._config,
            self.plan,
            self.replica_groups,
            self.clock,
            self.backward,
        )
        if self.core is not None:
            self.zero_grads.patch_optimizer()
        self.param_names = {param: name for name, param in self.module.named_parameters()}

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any = None) -> None:
        """Add an optimizer to an engine made without one, for trainers whose optimizer needs the engine. Collective
        over all ranks. RuntimeError: the engine has one, or was made at stage 3."""
        if self.core is not None or self.sharded is not None:
            raise RuntimeError(
                "_configure_optimizer() is for engines created by deepspeed.initialize() without an "
                "optimizer, at stages 0 to 2: pass this one to deepspeed.initialize(optimizer=...)"
            )
        self._build_training(client_optimizer, list_parameters(model_parameters))
        self.lr_scheduler = resolve_scheduler(
            self._config, self.client_lr_scheduler, self.basic_optimizer, client_optimizer
        )

    # The training step --------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run ``module(*inputs, **kwargs)`` in the configured precision. A plain ``loss.backward()`` on its outputs
        divides gradients by the accumulation steps and reduces them, as ``engine.backward(loss)`` does."""
        self._recover()
        precision = self.plan.precision
        if self.data.inputs is not None:
            inputs, kwargs = self.data.transform(inputs, kwargs)
        self._network.phase = "forward"
        self.events.emit("before_forward", inputs=inputs, kwargs=kwargs)
        if precision.cast_inputs and precision.param is not None:
            inputs = cast_inputs(inputs, precision.param)
            if precision.cast_kwargs:
                kwargs = cast_inputs(kwargs, precision.param)
        module, sharded = self.module, self.sharded
        grad_enabled = torch.is_grad_enabled()
        if sharded is not None:
            sharded.coordinator.begin_forward(training=module.training)
        previous_scope = recompute_scope.begin_forward(self._checkpointing)
        try:
            with autocast_context(precision, self.device.type):
                outputs = module(*inputs, **kwargs)
        except BaseException as error:
            if grad_enabled:  # an evaluation is not part of a batch
                self.abandon_update(error)
            raise
        finally:
            recompute_scope.end_forward(previous_scope)
            if sharded is not None:
                sharded.coordinator.end_forward()
        if grad_enabled and self.core is not None and not inside_transform():
            self._plain_backward.watch(outputs)
        self.events.emit("after_forward", outputs=outputs)
        return outputs

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Back-propagate ``loss`` (a scalar) and reduce gradients as planned.

        The loss is divided by the accumulation steps, and weighted if batches vary in size, unless ``scale_wrt_gas`` is
        False, and multiplied by the loss scale; the returned loss is divided but not multiplied. A 16-bit loss is
        divided in fp32. May be called several times per step.
        """
        core, plain = self._require_core("backward"), self._plain_backward
        self._recover()
        check_scalar(loss)
        self._network.phase = "backward"
        plain.paused = True  # also while an observer differentiates the loss
        try:
            self.events.emit("before_backward", loss=loss)
            divided = loss
            if scale_wrt_gas:
                if self.clock.managed and self.clock.steps > 1:
                    divided = at_least_fp32(loss) / self.clock.steps
                if self.loss_weight is not None:
                    divided = at_least_fp32(divided) * self.loss_weight()
            scale = core.scaler.scale
            core.reducer.before_backward()
            core.reducer.watch(divided)
            scales = scale != 1.0 or core.scaler.plan.active
            (scaled_loss(divided, scale) if scales else divided).backward(retain_graph=retain_graph)
            self._end_backward()
        except BaseException as error:
            self.abandon_update(error)
            raise
        finally:
            plain.paused = False
        self.events.emit("after_backward", loss=loss, share=divided)
        return divided

    def _begin_plain_backward(self) -> None:
        core = self._require_core("backward")
        self._recover()
        factor = 1.0 / self.clock.steps if self.clock.managed else 1.0
        if not self._plain_backward.scaled:
            factor *= loss_scale_correction(core.scaler.scale, active=core.scaler.plan.active)
        self._network.phase = "backward"
        self.events.emit("before_backward", loss=None)
        core.reducer.before_backward(grad_factor=factor)
        core.reducer.agree_on_reached_params()

    def _end_plain_backward(self) -> None:
        self._end_backward()
        self.events.emit("after_backward", loss=None, share=None)

    def _backward_epilogue(self) -> None:
        """Recover from a failed backward. Documented name, called after one ``loss.backward()`` through several
        engines; gradients are already reduced when autograd returns."""
        self._require_core("backward")
        self._recover()

    def _end_backward(self) -> None:
        self._plain_backward.scaled = False
        assert self.core is not None
        self.events.emit("before_reduction")
        self.core.reducer.flush()

    def scale(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """Multiply ``loss`` by the current loss scale, for ``engine.scale(loss).backward()``. It may have any shape if
        ``backward`` gets the gradient of the same shape: ``engine.scale(output).backward(gradient)``. ``retain_graph``
        has no effect: any graph may be kept, if that ``backward`` is told to."""
        core = self._require_core("scale")
        self._recover()
        check_graph(loss)
        self._plain_backward.scaled = True
        return scaled_loss(loss, core.scaler.scale)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Clip, update, clear gradients and advance the schedule on a boundary; otherwise count the micro-batch."""
        core = self._require_core("step")
        if self.accumulation.inside_no_sync:
            raise AssertionError(
                "It is illegal to call Engine.step() inside no_sync context manager: leave it before the update."
            )
        self._recover()
        self._network.phase = "step"
        self.events.emit("before_step")
        self.facts.applied = False
        self.clock.stepping = True
        updates = self.clock.at_boundary
        try:
            if updates:
                self._take_model_step(core, lr_kwargs or {})
            self.clock.tick()
        except BaseException as error:
            self.abandon_update(error)
            raise
        finally:
            self.clock.stepping = False
            self._network.phase = ""
        self.events.emit("after_step")
        if updates:
            self.events.emit("after_update")

    def _take_model_step(self, core: TrainingCore, lr_kwargs: dict[str, Any]) -> None:
        self.events.emit("at_boundary")
        result = core.executor.step()
        if result.norm == 0.0 and core.reducer.used and not any(core.reducer.used):
            core.step_warnings.no_gradient()
        core.reducer.clear()
        if self.optimizer is not self.basic_optimizer:
            self.optimizer.last = result
        if not result.applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            advance(self.lr_scheduler, lr_kwargs, self.train_batch_size())
        self.facts.norm, self.facts.applied = result.norm, result.applied
        self.global_steps += 1
        self.global_samples += self._config.train_batch_size

    # After an exception --------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Abandon the update if a plain ``loss.backward()`` raised since the last call (Note: a backward that
        fails, in `zero/gradients/backward.py`)."""
        if self._plain_backward.failed:
            self.abandon_update()

    def abandon_update(self, error: BaseException | None = None) -> None:
        """Drop the micro-batches of an unfinished update, without effect on the next one. After an exception in
        forward, backward or step the engine calls this itself, with the ``error``.

        All ranks must call it, or none: this rank joins pending sums and gathers that others may wait for, unless
        ``error`` shows that they are gone.
        """
        self.events.emit("on_error", error=error)
        if isinstance(error, CommunicationError) or (
            self.replica_groups.share_weights and error is not None and not isinstance(error, Exception)
        ):
            return  # the other ranks are gone, or this one is terminating
        self._plain_backward.forget()
        if self.core is None:
            if self.sharded is not None:
                self.sharded.abandon()
            return
        self.core.reducer.abandon()
        if self.sharded is not None:
            self.sharded.abandon()
            self.core.reducer.abandon()  # completed gathers may have launched sums: drop these too
        self.clock.rewind()

    # Modes and destruction ---------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        nn.Module.train(self, mode)
        if self.sharded is not None:
            self.sharded.coordinator.trains_in_eval_mode = False  # trust module.training again
        return self

    def destroy(self) -> None:
        """Remove hooks and unflatten the parameters, so that the module can be used without the engine.

        At stage 3 the parameters become whole on every rank: collective. Returns when all checkpoints are on
        disk; CheckpointError: one of them could not be stored.
        """
        self._destroyed = True
        try:
            if self.background_writer is not None:
                self.background_writer.close()  # its thread reads the attributes of sharded parameters
        finally:
            self._release()
        self.checkpoints.wait_until_stored()

    def _release(self) -> None:
        self.events.emit("on_destroy")
        self.zero_grads.remove()
        self._network.leave()
        meshes.leave(self.mesh)
        self._checkpointing.leave()
        core, self.core = self.core, None
        sharded, self.sharded = self.sharded, None
        if core is not None:
            core.close(own_weights=sharded is None)
        if sharded is not None:
            sharded.destroy()

    # Attributes ----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
            return getattr(module, name)

    def _require_core(self, what: str) -> TrainingCore:
        """Return the training core. RuntimeError that names the method ``what`` if this engine does not train."""
        if self.core is None:
            raise no_training(
                what, destroyed=self._destroyed, configured=self._config.optimizer_name is not None
            )
        return self.core

    @cached_property
    def checkpoint_engine(self) -> Any:
        """Storage of single files (``checkpoint.writer``); crash safety of a checkpoint folder does not depend on
        it."""
        from deepspeed.checkpoint.storage.utils import create_checkpoint_engine

        return create_checkpoint_engine(self._config, None, 0, False, False)

    @property
    def state_access(self) -> Any:
        """Access to weights, gradients and optimizer state by parameter (``zero/states/access.py``), or None."""
        return self.core.access if self.core is not None else None

    def _make_dataloader(self, dataset: Any) -> DeepSpeedDataLoader:
        """Make the loader of ``training_data``."""
        return self.deepspeed_io(dataset)
