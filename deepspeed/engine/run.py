"""The beginning of a run: the state that it resumes from, and what keeps states for the next."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed.base.constants import ELASTIC_STATE
from deepspeed.base.logging import logger
from deepspeed.engine.observers.progress.start_report import reporter

if TYPE_CHECKING:
    from deepspeed.checkpoint.replicas import Replicas
    from deepspeed.engine.engine import DeepSpeedEngine


def begin_run(engine: DeepSpeedEngine) -> None:
    """Load the newest state there is, in memory or in ``checkpoint.folder``, if the config asks for that, and
    attach what keeps states from now on. Collective where it does something."""
    settings = engine._config.checkpoint_config
    memory = os.environ.get(ELASTIC_STATE)
    replicas = _replicas(engine, memory)
    if replicas is not None and (tag := replicas.newest()) is not None:
        engine.load_checkpoint(str(replicas.folder), tag)
        reporter(engine)(f"resumed at step {engine.global_steps}, from the state in memory")
    elif settings.resume and settings.folder is not None:
        _resume(engine, settings.folder)
    if memory is not None:
        from deepspeed.engine.observers.elastic import ElasticRun  # rarely asked for

        ElasticRun(engine, Path(memory), replicas)
    if settings.save_at_sigterm or settings.save_before is not None:
        from deepspeed.engine.observers.last_save import LastSave

        LastSave(engine)


def _replicas(engine: DeepSpeedEngine, memory: str | None) -> Replicas | None:
    section = engine._config.elasticity_config
    if section is None or not section.replicate_state or engine.core is None:
        return None
    if memory is None:
        if engine.global_rank == 0:
            logger.warning(
                "elasticity.replicate_state has no effect: the run was not started by deepspeed --elastic_training"
            )
        return None
    from deepspeed.checkpoint.replicas import Replicas

    return Replicas(Path(memory))


def _resume(engine: DeepSpeedEngine, folder: str) -> None:
    from deepspeed.checkpoint.names import LATEST
    from deepspeed.checkpoint.ranks import Ranks

    mirror = engine.checkpoints.mirror(folder)
    if Ranks().any(Path(folder, LATEST).exists() if mirror is None else mirror.has_any()):
        engine.load_checkpoint(folder)
        reporter(engine)(f"checkpoint.resume: resumed at step {engine.global_steps}")
    else:
        reporter(engine)(f"checkpoint.resume: there is no checkpoint in {folder} yet: the run begins")
