"""ZenFlow in an engine: attributes for scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.zero.offload.zenflow import ZenFlowStepExecutor

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


def configure_zenflow(engine: Any) -> None:
    """Set ZenFlow's steps per epoch, and the documented attributes: ``engine.zenflow`` (whether it is enabled), and
    if so ``auto_update``, ``update_interval``, ``select_strategy``, ``select_interval``, ``overlap_step``,
    ``full_warm_up_rounds``."""
    executor = engine.core.executor if engine.core is not None else None
    engine.zenflow = isinstance(executor, ZenFlowStepExecutor)
    section = engine._config.zero_config.zenflow
    if not isinstance(executor, ZenFlowStepExecutor) or section is None:
        return
    if section.steps_per_epoch is None and engine.training_dataloader is not None:
        batches = len(engine.training_dataloader) // engine._config.gradient_accumulation_steps
        section.steps_per_epoch = max(1, batches)
    executor.zenflow.steps_per_epoch = section.steps_per_epoch
    engine.auto_update = section.update_interval == "auto"
    for name in "update_interval select_strategy select_interval overlap_step full_warm_up_rounds".split():
        setattr(engine, name, getattr(section, name))


def is_zenflow_update_boundary(engine: Engine) -> bool:
    """Return whether the next step is the last of a round, after which gradients are sent to the host."""
    executor = engine.core.executor if engine.core is not None else None
    if not isinstance(executor, ZenFlowStepExecutor):
        return False
    return executor.zenflow.in_round + 1 >= executor.zenflow.interval
