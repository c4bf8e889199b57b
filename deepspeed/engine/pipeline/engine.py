"""The engine of a ``PipelineModule``: runs whole batches through all stages, on the same core as other engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.base.logging import log_dist
from deepspeed.checkpoint.placement import kinds_of_experts
from deepspeed.checkpoint.save_ids import MarkedFiles
from deepspeed.data.loader import DeepSpeedDataLoader, EpochSampler, RepeatingLoader
from deepspeed.engine.pipeline.instructions import InstructionExecutor
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages import p2p
from deepspeed.parallel.pipeline.messages.channels import ReceiveChannel, SendChannel
from deepspeed.parallel.pipeline.messages.values import mean_of
from deepspeed.parallel.pipeline.module import PipelineModule
from deepspeed.parallel.pipeline.order_executor import OrderExecutor
from deepspeed.parallel.pipeline.schedules import orders
from deepspeed.parallel.pipeline.schedules.choice import OrderChoice
from deepspeed.parallel.pipeline.schedules.orders import Action, ActionKind, Order
from deepspeed.parallel.pipeline.split_backward import WeightQueue, join_layers, split_layers
from deepspeed.parallel.pipeline.stage_weights import AllStageWeights
from deepspeed.transforms.recompute import checkpointing
from deepspeed.zero.replica_groups import SHARED_BY


class PipelineEngine(InstructionExecutor):
    """Trains a ``PipelineModule`` with ``train_batch`` and evaluates it with ``eval_batch``.

    A batch of ``gradient_accumulation_steps`` micro-batches follows the order of ``pipeline.schedule``. Each
    micro-batch is a pair (inputs, labels), read by the first and the last stage. Gradients are summed over replicas
    once, at the end of the batch.
    """

    def __init__(self, has_bool_tensors: bool = False, *super_args: Any, **super_kwargs: Any) -> None:
        _find_idle(super_kwargs.get("model"))
        super().__init__(*super_args, **super_kwargs)
        module, section = self.stage_module, self._config.pipeline
        self.has_attention_mask = False
        self._run: OrderExecutor | None = None
        self._configure_module(module, section)
        if self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)
        if self.is_pipe_parallel:
            p2p.init_process_groups(self.grid)
        self._choice = OrderChoice(
            self._schedule(str(section["schedule"])), self.layout, int(section["max_held"])
        )
        self._peak_held = 0
        kinds = _of_stages(module, kinds_of_experts(module.parameters()))
        self.experts_of_stages = frozenset().union(*kinds)
        self._prepare_training()

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any = None) -> None:
        super()._configure_optimizer(client_optimizer, model_parameters)
        self._prepare_training()

    def _prepare_training(self) -> None:
        """Set up deferred weight gradients and the order, if there is an optimizer."""
        self._split: list[nn.Module] = []
        if self.core is not None:
            self._stage.weights = WeightQueue(self.core.reducer.add)
            self._order(self.clock.steps)  # raises now if the order is impossible
            if self._choice.may_split:
                numbers = {id(param): number for number, param in enumerate(self.core.reducer.params)}
                self._split = split_layers(self.stage_module, numbers, self._stage.weights)
            if said := self.when_gradients_are_summed():
                log_dist(said, ranks=[0])

    def _configure_module(self, module: PipelineModule, section: dict[str, Any]) -> None:
        """Apply the config's section ``pipeline`` to the module."""
        if section["activation_checkpoint_interval"] > 0:
            module.set_checkpoint_interval(section["activation_checkpoint_interval"])
        is_default = module.activation_checkpoint_func is checkpointing.checkpoint
        if not section.get("use_reentrant", True) and is_default:
            module.activation_checkpoint_func = checkpointing.non_reentrant_checkpoint
        module.checkpoint_parallel_write_pipeline = self._config.checkpoint_parallel_write_pipeline

    def _transform_module(
        self, model: nn.Module, optimizer: Any, model_parameters: list[Any] | None
    ) -> list[Any] | None:
        found = super()._transform_module(model, optimizer, model_parameters)
        if isinstance(model, PipelineModule):
            model.rebind_layers()
        return found

    def pipe_channels(self) -> Iterator[tuple[str, ReceiveChannel | SendChannel]]:
        """Yield the channels to and from adjacent stages: the name of the content, and the channel."""
        return self._stage_channels.named()

    # A batch --------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on one batch: one micro-batch from ``data_iter`` per accumulation step, then an update.

        ``data_iter`` yields (inputs, labels); only the first and the last stage read it. Without it the engine's own
        loader is repeated. Returns the mean loss over micro-batches and replicas, fp32 [], on every rank.
        RuntimeError: gradients are disabled.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients, which are disabled here: use eval_batch()")
        self.load_guard.refuse()
        core = self._require_core("train_batch")
        self._check_batch_begins()
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._compute_loss = True
        self._batch_losses.begin_batch()
        self.train()
        if self._replaced("TrainSchedule"):
            return self._train_by_instructions()
        count = self.clock.steps
        order = self._order(count)
        core.reducer.pause_sums()  # replicas, and stages with tied weights, sum at the end of the batch
        self._stage.summed_in = self._overlapped(order)
        try:
            self._stage.weights.active = order.split
            run = OrderExecutor(
                self._stage,
                self._channels,
                self.stage_id,
                training=True,
                split=order.split,
                timed=self._choice.timed,
                on_backward=self._stage.count_micro_batch,
            )
            self._run = run
            self._stage_channels.begin()
            losses = run.run(order.actions[self.stage_id])
            self._peak_held = run.peak_held
            core.reducer.resume_sums()
            core.reducer.finish()  # overlaps with the last backwards of earlier stages
        except BaseException as error:
            self.abandon_update(error)
            raise
        finally:
            self._run = None
            self._stage.end_batch()
            core.reducer.resume_sums()
        loss = self.agreed_loss = self._batch_losses.agree(losses, count)
        super().step()
        self._choice.learn(run.seconds, self.stage_id, self.device)
        return loss

    def _schedule(self, asked: str) -> str:
        """Return the schedule to use for ``pipeline.schedule``."""
        return asked

    def _order(self, micro_batches: int) -> Order:
        """Return the order of the next batch, by ``pipeline.schedule``."""
        return self._choice.order(micro_batches)

    def _overlapped(self, order: Order) -> Action | None:
        """Return the backward that overlaps with the sums of this stage's gradients over its replicas, bucket by
        bucket: the last action, unless another stage waits for its result or takes part in the sums (tied
        weights)."""
        last, core = order.actions[self.stage_id][-1], self._require_core("train_batch")
        awaited = (
            self._channels[last.chunk].input_gradients is not None or last.kind is not ActionKind.BACKWARD
        )
        if awaited or core.reducer.turns is not None:
            return None
        return None if any(hasattr(param, SHARED_BY) for param in core.reducer.params) else last

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate micro-batches from ``data_iter``, by default one per accumulation step.

        Args:
            return_logits: return (result, outputs of the last stage for the last micro-batch).
            compute_loss: False: results are the outputs of the model, not of ``loss_fn``.
            reduce_output: "avg": the mean over micro-batches, and of the loss over replicas; None: a list.
            bcast_loss: every rank gets the loss; otherwise only the last stage, and the others None. False where
                ``loss_fn`` returns several losses, of which each is averaged.
            num_micro_batches: number of micro-batches.
        """
        if reduce_output not in ("avg", None):
            raise ValueError(f"reduce_output={reduce_output!r}: must be 'avg' or None")
        self.load_guard.refuse()
        count = num_micro_batches or self.clock.steps
        mode, iterator = self.module.training, self.data_iterator
        self.set_dataiterator(data_iter)
        self._compute_loss = compute_loss
        self.eval()
        try:
            with torch.no_grad():
                if self._replaced("InferenceSchedule"):
                    results = self._evaluate_by_instructions(count, return_logits)
                else:
                    results = self._evaluate(count)
        finally:
            self._stage.end_batch()
            self.train(mode)
            self.data_iterator, self._compute_loss = iterator, True
        outputs, self.outputs = self.outputs, None
        result = self._reduced(results, count, compute_loss, reduce_output, bcast_loss)
        return (result, outputs) if return_logits else result

    def _evaluate(self, count: int) -> list[Any]:
        """Return the results of ``count`` micro-batches, on the last stage."""
        layout = self.layout
        order = orders.forward_only(layout.stages, count, layout.chunks, zigzag=layout.zigzag)
        run = OrderExecutor(self._stage, self._channels, self.stage_id, training=False)
        self._stage_channels.begin()
        return run.run(order.actions[self.stage_id])

    def _reduced(
        self, results: list[Any], count: int, compute_loss: bool, reduce_output: str | None, bcast_loss: bool
    ) -> Any:
        agreed = self._batch_losses
        several = not bcast_loss and bool(results) and isinstance(results[0], (list, tuple))
        if reduce_output is None and (several or not compute_loss):
            return results if self.has_loss else None
        if not compute_loss:
            return mean_of(results) if self.has_loss else None
        if several:
            return [self._reduced(list(one), count, True, "avg", False) for one in zip(*results, strict=True)]
        if reduce_output is None:
            losses = torch.stack([loss.float() for loss in results]) if results else torch.zeros(count)
            if bcast_loss:
                losses = agreed.from_last_stage(losses.to(self.device))
            return list(losses) if bcast_loss or self.has_loss else None
        loss = agreed.over_replicas(agreed.mean(results))
        if bcast_loss:
            return agreed.from_last_stage(loss)
        return loss if self.has_loss else None

    @property
    def pipe_buffers(self) -> dict[str, list[Any]]:
        """Buffers of this stage for the current training batch, indexed by ``chunk * micro_batches + micro_batch``:
        inputs, outputs, labels; None where empty, as after a batch. "grads" and "losses" are always empty, as they
        are consumed immediately. With a schedule of instructions: the buffers into which instructions write."""
        if self._run is None and self._pipe_buffers:
            return self._pipe_buffers
        count = self.micro_batches
        run = self._run or OrderExecutor(self._stage, self._channels, self.stage_id, training=True)
        held = run.buffers(count)
        others = ("output_tensors", "grads", "losses")
        return held | {name: [None] * (count * len(self._channels)) for name in others}

    # Data -----------------------------------------------------------------------------------------------------

    def _make_dataloader(self, dataset: Any) -> DeepSpeedDataLoader:
        """Make a loader without shuffling: as documented, a pipeline reads the data set in order."""
        loader = super()._make_dataloader(dataset)
        if isinstance(loader.data_sampler, EpochSampler):
            loader.data_sampler.shuffle = False
        return loader

    def set_dataloader(self, loader: Any) -> None:
        """Read batches from ``loader``, repeated without end."""
        if self.is_first_stage() or self.has_loss:
            self.training_dataloader = loader
            self.data_iterator = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read batches from ``iterator``."""
        if self.is_first_stage() or self.has_loss:
            self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Pass every batch through ``fn``, which returns (inputs, labels)."""
        self.batch_fn = fn

    def set_has_attention_mask(self, value: bool) -> None:
        """Kept for old scripts: masks are sent like any other tensor."""
        self.has_attention_mask = bool(value)

    def reset_activation_shape(self) -> None:
        """Kept for old scripts: changes of shape are detected."""

    def of_all_stages(self, weights: Any) -> Any:
        if self.num_stages == 1:
            return weights
        return AllStageWeights(weights, self.grid.pp_group, self.grid.get_pipe_parallel_group(), self.device)

    def layer_writer(self, exclude_frozen: bool) -> Callable[[Path, Mapping[str, Any]], None]:
        """Return the function that writes the files of this stage's layers ("layer_03-model_00-model_states.pt") and
        experts."""

        def write(folder: Path, save: Mapping[str, Any]) -> None:
            files = MarkedFiles(self.checkpoint_engine, save)
            self.stage_module.save_state_dict(folder, files, exclude_frozen)
            self.checkpoints.write_experts(folder, save, exclude_frozen=exclude_frozen)

        return write

    # Unsupported in a pipeline ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError("a single stage has no forward(): call train_batch() or eval_batch()")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError("a single stage has no backward(): call train_batch()")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError("a single stage has no step(): call train_batch()")

    def _release(self) -> None:
        join_layers(self._split)
        self._stage_channels.close()
        super()._release()

    def get_additional_losses(self) -> dict[str, float] | None:
        """Return the additional losses of the last batch (``PipelineModule.get_additional_losses``): means over
        micro-batches and replicas, by name."""
        return dict(self._batch_losses.reports) or None

    # Reports --------------------------------------------------------------------------------------------------

    def log_for_device(self, *msg: Any) -> None:
        """Log ``msg`` on this rank."""
        log_dist(" ".join(map(str, msg)), ranks=[self.global_rank])

    def tput_log(self, *msg: Any) -> None:
        """Log ``msg`` on rank 0 every ``steps_per_print`` steps."""
        every = self.steps_per_print() or math.inf
        if self.global_rank == 0 and self.global_steps % every == 0:
            log_dist(" ".join(map(str, msg)), ranks=[0])


def _find_idle(model: Any) -> None:
    """Mark a stage without trained parameters, if other stages have some."""
    if not isinstance(model, PipelineModule) or model.num_stages == 1:
        return
    own = any(param.requires_grad for param in model.parameters())
    model.idle = any(_of_stages(model, own)) and not own


def _of_stages(model: PipelineModule, own: Any) -> list[Any]:
    """Gather ``own`` from each stage. Collective over the stages."""
    found: list[Any] = [None] * model.num_stages
    dist.all_gather_object(found, own, group=model.mpu().get_pipe_parallel_group())
    return found
