"""Data efficiency: the sections ``curriculum_learning`` and ``data_efficiency``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from deepspeed.data.requested_samplers import varies_batches

if TYPE_CHECKING:
    from deepspeed.data.curriculum_scheduler import CurriculumScheduler
    from deepspeed.engine.interface import Engine


@runtime_checkable
class ReadsBatches(Protocol):
    """An engine that reads its own batches (pipelines)."""

    change_batch: Callable[[Any], Any] | None


def attach_data_efficiency(engine: Engine) -> None:
    """Set the documented attributes, and attach input transforms and observers as configured."""
    if engine._config.curriculum_enabled_legacy:
        from deepspeed.data.curriculum_scheduler import CurriculumScheduler

        _grow_sequences(engine, CurriculumScheduler(engine._config.curriculum_params_legacy or {}))
    section = engine._config.data_efficiency_config
    routing = section["data_routing"]
    if section["enabled"] and routing["enabled"] and routing["random_ltd"]["enabled"]:
        from deepspeed.engine.observers.random_ltd import RandomLTD  # imported on demand

        RandomLTD(engine, routing["random_ltd"], section["seed"])
    if engine.training_dataloader is not None and varies_batches(engine._config):
        from deepspeed.data.data_sampling import variable_batch_size_and_lr

        variable_batch_size_and_lr.attach(engine, engine.training_dataloader)


def _grow_sequences(engine: Any, scheduler: CurriculumScheduler) -> None:
    """Truncate sequences to the current difficulty. Pipeline stages truncate the batch as they read it, since inputs
    and labels are on different stages."""
    from deepspeed.transforms.truncation import CurriculumLength, cut

    engine.curriculum_scheduler_legacy = scheduler
    reads_batches = isinstance(engine, ReadsBatches)
    if reads_batches:

        def shortened(batch: Any) -> Any:
            if not engine.module.training:
                return batch
            return cut(batch, scheduler.update_difficulty(engine.global_steps + 1))

        engine.change_batch = shortened
    else:
        engine.add_input_transform(CurriculumLength(engine.module, scheduler))

    def resume(**_: Any) -> None:
        if scheduler.lacks_function:  # it may be given after the checkpoint is loaded
            return
        scheduler.set_current_difficulty(scheduler.get_difficulty(engine.global_steps))

    engine.events.on("on_load", resume)
