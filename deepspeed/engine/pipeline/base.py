"""The pipeline engine without its schedule: stage coordinates, data, and batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages.stage_channels import StageChannels
from deepspeed.parallel.pipeline.module import PipelineModule
from deepspeed.parallel.pipeline.order_executor import ChunkChannels
from deepspeed.parallel.pipeline.schedules.choice import ScheduleLayout
from deepspeed.parallel.pipeline.schedules.orders import stage_of_position


class PipelineEngineBase(DeepSpeedEngine):
    """The base of ``PipelineEngine`` that its parts (``stage.py``) and instructions use."""

    change_batch: Callable[[Any], Any] | None = None
    """Applied to every pair (inputs, labels) that is read, after ``batch_fn``."""
    outputs: Any = None
    """Outputs of the last stage for the last micro-batch of an evaluation."""
    _compute_loss: bool = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        module = self._checked_module()
        self.pipeline_parallelism = True
        self.grid = module.mpu()
        self.stage_id = self.grid.get_stage_id()
        self.num_stages = self.grid.get_pipe_parallel_world_size()
        self.layout = ScheduleLayout(self.num_stages, module.chunks, module.zigzag)
        last = self.num_stages * module.chunks - 1
        self.loss_stage = stage_of_position(last, self.num_stages, module.zigzag)
        """The stage of the last layer."""
        self.batch_fn: Callable[[Any], Any] | None = module.batch_fn
        self.data_iterator: Iterator[Any] | None = None
        self._stage_channels = StageChannels(
            self.layout,
            self.stage_id,
            self.grid.pp_group,
            self.grid.get_pipe_parallel_group(),
            self.device,
            may_share_memory=self._network.may_share_memory(),
        )

    def _checked_module(self) -> PipelineModule:
        """Return the module. TypeError, DeepSpeedConfigError: it cannot be trained here."""
        if not isinstance(self.module, PipelineModule):
            raise TypeError(f"PipelineEngine needs a PipelineModule, not {type(self.module).__name__}")
        if not self.clock.managed:
            raise DeepSpeedConfigError(
                "managed_gradient_accumulation=false: a pipeline counts the micro-batches of a batch itself; leave it "
                "true"
            )
        return self.module

    def when_gradients_are_summed(self) -> str:
        """Return a note on when ZeRO 2 and 3 sum gradients in a pipeline, and its memory cost; else an empty string."""
        zero, core = self.plan.zero, self.core
        if core is None or not zero.shard_grads or self.dp_world_size == 1 or self.num_stages == 1:
            return ""
        whole = sum(bucket.layout.padded_numel * bucket.dtype.itemsize for bucket in core.reducer.buckets)
        return (
            f"ZeRO stage {zero.stage} in a pipeline: gradients are summed over the {self.dp_world_size} "
            f"replicas of stage {self.stage_id} once per batch; until then, each rank holds those of the "
            f"whole stage, {whole / 2**20:.1f} MiB instead of {whole / self.dp_world_size / 2**20:.1f} MiB"
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches per batch: the accumulation steps. Setting it changes the batch size."""
        return self.clock.steps

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        self.set_train_batch_size(count * self.train_micro_batch_size_per_gpu() * self.dp_world_size)

    @property
    def micro_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu()

    @property
    def is_pipe_parallel(self) -> bool:
        return self.num_stages > 1

    @property
    def is_data_parallel(self) -> bool:
        return self.grid.get_data_parallel_world_size() > 1

    @property
    def is_model_parallel(self) -> bool:
        return self.grid.get_slice_parallel_world_size() > 1

    @property
    def prev_stage(self) -> int:
        """Number of the previous stage; -1: none."""
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """Number of the next stage; ``num_stages``: none."""
        return self.stage_id + 1

    @property
    def agg_train_loss(self) -> Tensor | None:
        """Last loss of ``train_batch``; None before the first batch."""
        return self.agreed_loss

    @agg_train_loss.setter
    def agg_train_loss(self, loss: Tensor | None) -> None:
        self.agreed_loss = loss

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    @property
    def _channels(self) -> list[ChunkChannels]:
        return self._stage_channels.channels

    @property
    def stage_module(self) -> PipelineModule:
        """The wrapped module."""
        module = self.module
        assert isinstance(module, PipelineModule)
        return module

    @property
    def has_loss(self) -> bool:
        """Return whether the last layer, and so the loss and the outputs, is on this stage."""
        return self.stage_id == self.loss_stage

    def _check_batch_begins(self) -> None:
        """Raise PipelineError if micro-batches of an unfinished batch were accumulated."""
        if self.clock.position:
            raise PipelineError(
                f"{self.clock.position} micro-batches of an unfinished batch were accumulated: call "
                "abandon_update() first to drop them"
            )

    def _next_batch(self) -> Any:
        """Read the next pair (inputs, labels), after ``batch_fn`` and ``change_batch``. PipelineError: not a pair, or
        no data."""
        if self.data_iterator is None:
            raise PipelineError(
                "no data: pass train_batch(data_iter=...), call set_dataloader(), or pass training_data= to initialize"
            )
        batch = next(self.data_iterator)
        if self.batch_fn is not None:
            batch = self.batch_fn(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise PipelineError(
                f"a micro-batch of a pipeline must be a pair (inputs, labels), not {type(batch).__name__}: "
                "convert it with set_batch_fn()"
            )
        return self.change_batch(batch) if self.change_batch is not None else batch
