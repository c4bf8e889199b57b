"""What scripts read from the engine of a pipeline: where a stage stands, and the numbers of its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepspeed.engine.engine import DeepSpeedEngine

if TYPE_CHECKING:
    from deepspeed.comm.topology import PipelineParallelGrid


class PipelineFacts(DeepSpeedEngine):
    """Attributes of ``PipelineEngine`` that follow from others."""

    grid: PipelineParallelGrid
    stage_id: int
    num_stages: int

    def when_gradients_are_summed(self) -> str:
        """With ZeRO 2 and 3, and what it costs; empty where nothing is to be said."""
        zero, core = self.plan.zero, self.core
        if core is None or not zero.shard_grads or self.dp_world_size == 1 or self.num_stages == 1:
            return ""
        whole = sum(bucket.layout.padded_numel * bucket.dtype.itemsize for bucket in core.reducer.buckets)
        return (
            f"ZeRO stage {zero.stage} in a pipeline: gradients are summed over the {self.dp_world_size} replicas of "
            f"stage {self.stage_id} once per batch; while it lasts, each rank holds those of the whole stage, "
            f"{whole / 2**20:.1f} MiB instead of {whole / self.dp_world_size / 2**20:.1f} MiB"
        )

    @property
    def micro_batches(self) -> int:
        """Of a batch: the accumulation steps. Setting them changes the size of the batch."""
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
        """The number of the stage before this one; -1: none."""
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """The number of the stage after this one; the number of stages: none."""
        return self.stage_id + 1

    @property
    def agg_train_loss(self) -> Tensor | None:
        """What ``train_batch`` returned last; None before the first batch."""
        return self.agreed_loss

    @agg_train_loss.setter
    def agg_train_loss(self, loss: Tensor | None) -> None:
        self.agreed_loss = loss

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1
