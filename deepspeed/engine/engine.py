"""The training engine: ``forward``, ``backward``, ``step``, saving and loading. Everything else is delegated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed import comm as dist
from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.events import Events
from deepspeed.base.logging import apply_log_level
from deepspeed.base.transforms import inside_transform
from deepspeed.checkpoint.save_ids import marked
from deepspeed.checkpoint.storage.utils import create_checkpoint_engine
from deepspeed.comm import documented_groups as groups
from deepspeed.comm.collectives import CommunicationError
from deepspeed.comm.init import network_of
from deepspeed.config.constants import ROUTE_EVAL, ROUTE_TRAIN  # noqa: F401 - documented here too
from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.config.plan import Plan, make_plan
from deepspeed.data.loader import DeepSpeedDataLoader
from deepspeed.engine import checkpoints as engine_checkpoint
from deepspeed.engine.assembly import (
    TrainingCore,
    broadcast_weights,
    build_core,
    check_ranks_agree,
    make_mesh,
    shard_module,
)
from deepspeed.engine.base import EngineBase
from deepspeed.engine.module_checks import check_module, lay_out_contiguously, require_module
from deepspeed.engine.observers.attach import attach_observers
from deepspeed.engine.observers.progress.start_report import log_start
from deepspeed.engine.optimizer import (
    check_made_for_host,
    check_membership,
    left_out,
    require_optimizer,
    require_trainable,
    resolve_optimizer,
)
from deepspeed.engine.parts.accumulation import MEMORY_OPT_ALLREDUCE_SIZE, Accumulation  # noqa: F401 - documented here too
from deepspeed.engine.parts.compiling import Compilation
from deepspeed.engine.parts.data import EngineData
from deepspeed.engine.parts.sparse_sums import SparseSums
from deepspeed.engine.parts.state import Checkpoints, StateMoves
from deepspeed.engine.patches import tell_patches
from deepspeed.engine.python_gc import python_gc_manager
from deepspeed.engine.stand_in import MethodStandIn
from deepspeed.engine.step_notes import StepNotes
from deepspeed.engine.surface import EngineSurface
from deepspeed.optim.schedulers import advance, resolve_scheduler
from deepspeed.parallel.expert.placement import place_experts, watched_layers, write_experts
from deepspeed.parallel.expert.stacked import mark_stacks
from deepspeed.parallel.selection import from_config
from deepspeed.planning.fits import check_fits
from deepspeed.planning.stages import note_stages
from deepspeed.transforms import ForwardFacts, InputChain, transform_module
from deepspeed.transforms.recompute import checkpointing
from deepspeed.zero.accumulation import AccumulationClock
from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gathering.sharded_model import ShardedModel
from deepspeed.zero.gathering.standalone_shard import make_whole
from deepspeed.zero.gradients.backward import PlainBackward, at_least_fp32, correction, scaled_loss
from deepspeed.zero.optimizer import ZeroOptimizer
from deepspeed.zero.optimizer_flags import set_state_dtype
from deepspeed.zero.placements import find_placements
from deepspeed.zero.precision import autocast_context, cast_inputs, cast_module
from deepspeed.zero.replica_groups import Scopes

DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]


class DeepSpeedEngine(EngineSurface, EngineBase):
    """A module with its optimizer, trained over all data-parallel ranks as the configuration says.

    Attribute access falls through to the wrapped module. It owns ``clock``, ``events``, the training ``core`` (built by
    ``engine/assembly.py``; None without an optimizer), ``sharded`` at stage 3, and the parts that answer what
    ``engine/surface.py`` lists: ``accumulation``, ``data``, ``compilation``, ``checkpoints``, ``moves`` and
    ``sparse_sums``. The path of gradients is described in ``docs/life_of_a_step.md``.
    """

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
        # What the config decides comes first: all that follows reads the plan.
        self.config = config
        self._config = config_class or DeepSpeedConfig(
            config, mpu, mesh_device, client_optimizer=optimizer is not None
        )
        apply_log_level(self._config.log_level)
        self.plan: Plan = make_plan(self._config)
        # Then the ranks: the module is changed and sharded by this rank's place among them.
        dist.init_distributed(dist_init_required=dist_init_required)
        self.mpu = mpu
        self._find_place(args, mesh_device)
        self.device = self._choose_device(model, dont_change_device)
        # What the engine owns from the start: transforms and the training core are given clock and events.
        self.clock = AccumulationClock(
            self._config.gradient_accumulation_steps, managed=self.plan.managed_accumulation
        )
        self.events = Events()
        self.accumulation = Accumulation(self)
        self.compilation = Compilation(self)
        self.checkpoints = Checkpoints(self)
        self.moves = StateMoves(self)
        self.sparse_sums = SparseSums(self)

        # Mistaken arguments are refused before the module is touched.
        require_optimizer(self.plan, optimizer is not None or self._config.optimizer_name is not None)
        require_module(model)
        if model_parameters is not None:
            model_parameters = list(model_parameters)  # it may be a generator, but is read twice
        # Transforms replace layers and parameters, so they precede whatever looks at these.
        model_parameters = self._transform_module(model, optimizer, model_parameters)
        check_module(model)
        if not self.plan.zero.shard_params:
            make_whole(model)
        # The memory is counted while nothing of it is taken on the device.
        note_stages(model, self.plan, self._config, optimizer, self.mesh, model_parameters)
        check_fits(model, self.plan, self._config, optimizer, self.mesh, model_parameters)
        # Masters and buckets copy the weights: by then these are on the device, in their dtype, equal on all ranks.
        self._take_module(model, move=not dont_change_device)
        self._build_training(optimizer, model_parameters)
        # The schedule sets rates in the optimizer's groups, and a loader of varying batches wraps the schedule.
        self.client_lr_scheduler = lr_scheduler
        self.lr_scheduler = resolve_scheduler(self._config, lr_scheduler, self.basic_optimizer, optimizer)

        self.collate_fn = collate_fn
        self.training_dataloader = self._own_loader(training_data) if training_data is not None else None
        if self.plan.zenflow is not None:
            from deepspeed.engine.zenflow import configure_zenflow

            configure_zenflow(self)
        self._plain_backward = PlainBackward(self._begin_plain_backward, self._end_plain_backward)
        self._begin_counting()
        # For single files; the safety of the folder does not depend on it.
        self.checkpoint_engine = create_checkpoint_engine(self._config, None, 0, False, False)
        self.background_writer = engine_checkpoint.create_background_writer(self)
        # Observers come last: they read all of the above, and the report says what was made.
        attach_observers(self)
        tell_patches(self)
        log_start(self)

    def _find_place(self, args: Any, mesh_device: Any) -> None:
        """Which rank this is, and among whom."""
        self._network = network_of(self._config)
        self.mesh = make_mesh(self.plan.axes, self.mpu, mesh_device).in_network(self._network)
        self.mesh.data_before_experts = self._config.use_data_before_expert_parallel_
        groups.follow(self.mesh)
        shared = self.mesh.communicator("tp") if self.mpu is None and self.mesh.size("tp") > 1 else None
        self._checkpointing = checkpointing.settings_for(self._config, self.mpu, self._network, shared)
        self.accelerator = get_accelerator()
        given = getattr(args, "local_rank", None)  # OmegaConf has None for what is not there
        self.local_rank = int(given) if given is not None and int(given) >= 0 else dist.get_local_rank()
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.dp_world_size = self.mesh.size("dp")  # ranks with different data
        self.seq_dp_world_size = self.mesh.size("dp", "sp")  # ranks that share gradients and state
        self.mp_world_size = self.mesh.size("tp")

    def _transform_module(
        self, model: nn.Module, optimizer: Any, model_parameters: list[Any] | None
    ) -> list[Any] | None:
        """Change the module as the config and its author ask, before anything is moved or sharded. Returns the
        parameters to train; a client's optimizer follows in place."""
        self.module_transforms = transform_module(
            model, self.plan, self._config, self.mesh, from_config(self._config)
        )
        self.data = EngineData(self, self.module_transforms.inputs)
        self.module_transforms.successors.in_optimizer(optimizer)
        return self.module_transforms.successors.in_parameters(model_parameters)

    def _take_module(self, model: nn.Module, *, move: bool) -> None:
        """Put the module on the device, in the plan's dtypes, and make it the same on every rank."""
        if move:
            model.to(self.device)
        cast_module(model, self.plan.precision)
        lay_out_contiguously(model)
        self.module = model
        self.num_experts = place_experts(model, self.mesh)
        mark_stacks(model)
        self.has_moe_layers = bool(self.num_experts) or any(True for _ in watched_layers(model))
        checkpointing.keep_layers(self._checkpointing, model)
        self.scopes = Scopes(
            self.mesh, int(self._config.zero_config.mics_shard_size), self.plan.packing.group
        ).find(model.parameters())
        find_placements(model.parameters(), self.mesh, self.scopes)
        check_ranks_agree(model, self.scopes.everyone)
        self._broadcast_model()
        self._zero_grads = [MethodStandIn(model, "zero_grad", self._zero_module)]

    def _broadcast_model(self) -> None:
        """Make the weights the same on every rank; trainers replace it whose weights are already."""
        broadcast_weights(self.module, self.scopes)

    def _build_training(self, optimizer: Any, model_parameters: list[Any] | None) -> None:
        """Build the optimizer and everything between gradients and updated weights."""
        self.client_optimizer = optimizer
        self.basic_optimizer = resolve_optimizer(
            self._config, self.plan, optimizer, model_parameters, self.module
        )
        require_trainable(self.plan, self.basic_optimizer)
        if self.basic_optimizer is not None:
            check_membership(self.basic_optimizer, self.module)
        if optimizer is not None:
            check_made_for_host(self.basic_optimizer, self.plan)
        elif self.basic_optimizer is not None:
            set_state_dtype(self.basic_optimizer, self.plan.precision.state)
        self.sharded: ShardedModel | None = None
        if self.plan.zero.shard_params:
            self.sharded = shard_module(
                self.module, self.basic_optimizer, self.plan, self._config, self.scopes
            )
        self.core: TrainingCore | None = None
        self.optimizer: Any = self.sharded.offload if self.sharded is not None else None
        if self.basic_optimizer is not None:
            spare = left_out(model_parameters, self.module, self.basic_optimizer) if optimizer is None else []
            self.core = build_core(
                self.module, self.basic_optimizer, self.plan, self.scopes, self.clock, self.sharded, spare
            )
            self.optimizer = self.core.optimizer
            self._step_notes = StepNotes(self.basic_optimizer, self.clock)
            self._zero_grads.append(MethodStandIn(self.basic_optimizer, "zero_grad", self._zero_optimizer))
            if isinstance(self.optimizer, ZeroOptimizer):
                self.optimizer.clock = self.clock
                self.optimizer.differentiate = weakref.WeakMethod(self.backward)
                self.optimizer.allgather_bucket_size = int(self._config.zero_config.allgather_bucket_size)
                self.optimizer.beside_engine = self._step_notes.beside_engine
        self.param_names = {param: name for name, param in self.module.named_parameters()}

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any = None) -> None:
        """Give an optimizer to an engine that was made without one, as trainers do whose optimizer needs the engine.
        Collective over all ranks. RuntimeError: the engine has one, or was made at stage 3."""
        if self.core is not None or self.sharded is not None:
            raise RuntimeError(
                "_configure_optimizer() gives an optimizer to an engine that deepspeed.initialize() made without one, "
                "at stages 0 to 2: pass this one to deepspeed.initialize(optimizer=...)"
            )
        self._build_training(client_optimizer, None if model_parameters is None else list(model_parameters))
        self.lr_scheduler = resolve_scheduler(
            self._config, self.client_lr_scheduler, self.basic_optimizer, client_optimizer
        )

    # The training step --------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module(*inputs, **kwargs)`` in the configured precision; a plain ``loss.backward()`` on what it returns
        divides gradients by the accumulation steps and reduces them, just as ``engine.backward(loss)`` does."""
        self._recover()
        precision = self.plan.precision
        if self.data.inputs is not None:
            inputs, kwargs = self._transform_inputs(self.data.inputs, inputs, kwargs)
        self._network.phase = "forward"
        self.events.emit("before_forward", inputs=inputs, kwargs=kwargs)
        if precision.cast_inputs and precision.param is not None:
            inputs = cast_inputs(inputs, precision.param)
            if precision.cast_kwargs:
                kwargs = cast_inputs(kwargs, precision.param)
        module, sharded = self.module, self.sharded
        recorded = torch.is_grad_enabled()
        if sharded is not None:
            gathering = sharded.coordinator
            if module.training:
                gathering.trains_in_eval_mode = False
            trains = recorded and (module.training or gathering.trains_in_eval_mode)
            gathering.this_thread.told = Phase.FORWARD if trains else Phase.EVALUATION
        before = checkpointing.begin_forward(self._checkpointing)
        try:
            if precision.autocast is None:
                outputs = module(*inputs, **kwargs)
            else:
                with autocast_context(precision, self.device.type):
                    outputs = module(*inputs, **kwargs)
        except BaseException as error:
            if recorded:  # an evaluation is not part of a batch
                self.abandon_update(error)
            raise
        finally:
            checkpointing.end_forward(before)
            if sharded is not None:
                sharded.coordinator.this_thread.told = None
        if recorded and self.core is not None and not inside_transform():
            self._plain_backward.watch(outputs)
        self.events.emit("after_forward", outputs=outputs)
        return outputs

    def _transform_inputs(
        self, chain: InputChain, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        facts = ForwardFacts(
            training=self.module.training, step=self.global_steps, micro_step=self.clock.micro_steps
        )
        try:
            return chain(inputs, kwargs, facts)
        except BaseException as error:
            if torch.is_grad_enabled():
                self.abandon_update(error)
            raise

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Back-propagate ``loss`` (a scalar) and reduce gradients as the plan says.

        The loss is divided by the accumulation steps, and weighted if batches vary in size, unless ``scale_wrt_gas`` is
        False, and multiplied by the loss scale; the returned loss is divided but not multiplied. One of 16 bits is
        divided in fp32. May be called several times per step.
        """
        core = self._require_core("backward")
        plain = self._plain_backward
        self._recover()
        _check_graph(loss)
        if loss.numel() != 1:
            raise ValueError(
                f"the loss must be a scalar, not of shape {tuple(loss.shape)}: reduce it with mean() or sum(), or call "
                "engine.scale(output).backward(gradient) if you have the gradient of an output"
            )
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
        share = 1.0 / self.clock.steps if self.clock.managed else 1.0
        if not self._scaled_loss:
            share *= correction(core.scaler.scale, active=core.scaler.plan.active)
        self._network.phase = "backward"
        self.events.emit("before_backward", loss=None)
        core.reducer.before_backward(share=share)

    def _end_plain_backward(self) -> None:
        self._end_backward()
        self.events.emit("after_backward", loss=None, share=None)

    def _backward_epilogue(self) -> None:
        """What the documents call after the ``loss.backward()`` of a loss of several engines. The gradients are already
        reduced when autograd returns, so this only notices a backward that failed on its way to this engine."""
        self._require_core("backward")
        self._recover()

    def _end_backward(self) -> None:
        if self._scaled_loss:
            self._scaled_loss = False
        assert self.core is not None
        self.events.emit("before_reduction")
        self.core.reducer.flush()

    # After an exception --------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Notice a plain ``loss.backward()`` that raised since the last call (Note: a backward that fails)."""
        if self._plain_backward.failed:
            self.abandon_update()

    def abandon_update(self, error: BaseException | None = None) -> None:
        """Drop the micro-batches of an unfinished update: the next one trains as if they had never been. After an
        exception in forward, backward or step the engine calls this itself, with the ``error``.

        Either every rank calls this or none: this rank joins any sums and gathers that the others may wait for, unless
        ``error`` shows that they cannot.
        """
        self.events.emit("on_error", error=error)
        if isinstance(error, CommunicationError) or (
            self.scopes.share_weights and error is not None and not isinstance(error, Exception)
        ):
            return  # the other ranks are gone, or this one was asked to terminate
        self._plain_backward.forget()
        self._scaled_loss = False
        if self.core is None:
            if self.sharded is not None:
                self.sharded.abandon()
            return
        self.core.reducer.abandon()
        if self.sharded is not None:
            self.sharded.abandon()
            self.core.reducer.abandon()  # sums whose turn came among the remaining gathers
        self.clock.rewind()

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the current loss scale, for ``engine.scale(loss).backward()``. It may have any shape if
        ``backward`` gets the gradient of the same shape: ``engine.scale(output).backward(gradient)``."""
        core = self._require_core("scale")
        self._recover()
        _check_graph(loss)
        self._scaled_loss = True
        return scaled_loss(loss, core.scaler.scale)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """On a boundary: clip, update, clear gradients, advance the schedule; otherwise count the micro-batch."""
        if self.accumulation.sums_wait:
            raise AssertionError(
                "It is illegal to call Engine.step() inside no_sync context manager: leave it before the update."
            )
        core = self._require_core("step")
        self._recover()
        self._network.phase = "step"
        self.events.emit("before_step")
        self._step_applied = False
        self.clock.stepping = True
        try:
            if self.clock.at_boundary:
                self._take_model_step(core, lr_kwargs or {})
            self.clock.tick()
        except BaseException as error:
            self.abandon_update(error)
            raise
        finally:
            self.clock.stepping = False
            self._network.phase = ""
        self.events.emit("after_step")

    def _take_model_step(self, core: TrainingCore, lr_kwargs: dict[str, Any]) -> None:
        self.events.emit("at_boundary")
        result = core.executor.step()
        if result.norm == 0.0 and core.reducer.used and not any(core.reducer.used):
            self._step_notes.no_gradient()
        core.reducer.clear()
        if self.optimizer is not self.basic_optimizer:
            self.optimizer.last = result
        if not result.applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            advance(self.lr_scheduler, lr_kwargs, self.train_batch_size())
        self._global_norm, self._step_applied = result.norm, result.applied
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

    def zero_grad(self) -> None:
        """Drop every gradient, including those already reduced. Between the micro-batches of an update it does nothing:
        there it is a leftover of a loop that updated after each of them, and ``abandon_update`` drops them."""
        self._recover()
        if self.clock.mid_update:
            return
        if self.core is not None:
            self.core.reducer.clear()
        for param in self.module.parameters():
            param.grad = None

    def _zero_module(self, *args: Any, **kwargs: Any) -> None:
        """Answer ``module.zero_grad()``: from stage 1 on gradients are kept elsewhere than in ``param.grad``."""
        self._recover()
        if not self.clock.mid_update:
            type(self.module).zero_grad(self.module, *args, **kwargs)
            self.zero_grad()

    def _zero_optimizer(self, *args: Any, **kwargs: Any) -> None:
        """Answer ``zero_grad()`` of the optimizer that ``engine.optimizer`` is or wraps. What it does to ``param.grad``
        at stage 0 counts as if assigned (``GradReducer``)."""
        self._recover()
        if self.clock.mid_update:
            return
        optimizer: Any = self.basic_optimizer
        type(optimizer).zero_grad(optimizer, *args, **kwargs)
        if self.core is not None and not self.core.reducer.expose:
            self.core.reducer.clear()

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        nn.Module.train(self, mode)
        if self.sharded is not None:
            self.sharded.coordinator.trains_in_eval_mode = False  # what it announces counts from here on
        return self

    def eval(self) -> DeepSpeedEngine:
        return self.train(False)

    def _own_loader(self, dataset: Any) -> DeepSpeedDataLoader:
        """The loader of ``training_data``."""
        return self.deepspeed_io(dataset)

    # The end ------------------------------------------------------------------------------------------------

    def layer_writer(self, exclude_frozen: bool) -> Callable[[Path, Mapping[str, Any]], None] | None:
        """Return what writes the file of each expert, where weights are whole (stages 0 to 2)."""
        if not self.num_experts or self.plan.zero.shard_params:
            return None
        return self._expert_writer(exclude_frozen)

    def _expert_writer(self, exclude_frozen: bool) -> Callable[[Path, Mapping[str, Any]], None]:
        files = self.checkpoint_engine

        def write(folder: Path, save: Mapping[str, Any]) -> None:
            write_experts(
                self.module,
                self.mesh,
                lambda state, name: files.save(marked(state, save), str(folder / name)),
                exclude_frozen,
            )
            if info := files.get_commit_info():
                files.commit(info)  # all of them are in the folder before it gets its name

        return write

    def empty_partition_cache(self) -> None:
        """Stage 3: release every parameter that is gathered and not in use."""
        if self.sharded is not None:
            self.sharded.transitions.release_all()

    def collect_python_gc(self) -> int:
        """Collect cyclic garbage now, for ``disable_python_gc``; returns the number of objects."""
        return python_gc_manager.collect()

    def destroy(self) -> None:
        """Remove hooks and give every parameter its own memory back; the module can then be used without the engine.

        At stage 3 the parameters become whole on every rank: collective. Returns when all checkpoints are on
        disk; CheckpointError: one of them could not be stored.
        """
        self._destroyed = True
        self.events.emit("on_destroy")
        for stand_in in self._zero_grads:
            stand_in.remove()
        self._network.leave()
        groups.leave(self.mesh)
        checkpointing.leave(self._checkpointing)
        core, self.core = self.core, None
        sharded, self.sharded = self.sharded, None
        if core is not None:
            self._step_notes.remove()
            core.executor.close()
            if core.client_state is not None:
                core.client_state.release(core.store.optimizer)
            core.store.tier.close()
            for param in core.store.params:
                if vars(param).get("_ds_state_access") is core.access:  # not that of an engine made since
                    del param._ds_state_access  # type: ignore[attr-defined]
        if sharded is not None:
            sharded.destroy()
        elif core is not None:
            for bucket in core.store.param_buckets:
                bucket.destroy()
        if self.background_writer is not None:
            self.background_writer.close()
        engine_checkpoint.wait_for_flushes()

    # Plumbing -----------------------------------------------------------------------------------------------

    def _choose_device(self, model: nn.Module, keep: bool) -> torch.device:
        if keep:
            first = next(model.parameters(), None)
            return first.device if first is not None else torch.device("cpu")
        if self.accelerator.device_name() != "cpu":
            self.accelerator.set_device(self.local_rank)
        return torch.device(self.accelerator.device_name(self.local_rank))


def _check_graph(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be a tensor, not {type(loss).__name__}")
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss does not require grad: it was computed under no_grad, or no trainable parameter took part in it"
        )
