"""A run under an elastic launcher: replicates its state in memory after each step, and reports steps to the
launcher."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.base.constants import ELASTIC_PROGRESS
from deepspeed.comm import get_local_rank
from deepspeed.engine.saving import state_to_save

if TYPE_CHECKING:
    from deepspeed.checkpoint.replicas import Replicas
    from deepspeed.engine.interface import Engine

_STEPS = struct.Struct("<q")


class ElasticRun:
    """Keeps replicas and reports progress. ``memory``: the launcher's folder on this machine; the first rank there
    writes the number of finished steps into its progress file, after the step's state is kept, so that a change of
    ranks loses no step. ``replicas``: None to keep no state.
    """

    def __init__(self, engine: Engine, memory: Path, replicas: Replicas | None) -> None:
        self.engine = engine
        self.replicas = replicas
        self._progress: mmap.mmap | None = None
        if get_local_rank() == 0:
            with open(memory / ELASTIC_PROGRESS, "r+b") as file:
                self._progress = mmap.mmap(file.fileno(), _STEPS.size)
        engine.events.on("after_update", self.after_update)
        engine.events.on("on_destroy", self.close)

    def after_update(self, **_: Any) -> None:
        engine = self.engine
        if self.replicas is not None:
            state = state_to_save(engine, {}, exclude_frozen=False)
            self.replicas.keep(state, engine.mesh, engine.global_steps)
        if self._progress is not None:
            _STEPS.pack_into(self._progress, 0, engine.global_steps)

    def close(self, **_: Any) -> None:
        if self.replicas is not None:
            self.replicas.close()
        if self._progress is not None:
            self._progress.close()
