"""What an engine tells about ZenFlow."""

from __future__ import annotations

from deepspeed.engine.base import EngineBase
from deepspeed.zero.offload.zenflow import ZenFlowStepExecutor


def configure_zenflow(engine: EngineBase) -> None:
    """Tell ZenFlow the length of an epoch, and set the documented attributes: ``engine.zenflow`` (whether it is on),
    and if so ``auto_update``, ``update_interval``, ``select_strategy``, ``select_interval``, ``overlap_step``,
    ``full_warm_up_rounds``."""
    executor = engine.core.executor if engine.core is not None else None
    on = isinstance(executor, ZenFlowStepExecutor)
    attributes = vars(engine)
    attributes["zenflow"] = on
    if not isinstance(executor, ZenFlowStepExecutor):
        return
    section = engine._config.zero_config.zenflow
    assert section is not None
    if engine.training_dataloader is not None:
        batches = len(engine.training_dataloader) // engine.gradient_accumulation_steps()
        executor.zenflow.steps_per_epoch = section.steps_per_epoch = max(1, batches)
    attributes["auto_update"] = section.update_interval == "auto"
    for name in (
        "update_interval",
        "select_strategy",
        "select_interval",
        "overlap_step",
        "full_warm_up_rounds",
    ):
        attributes[name] = getattr(section, name)
