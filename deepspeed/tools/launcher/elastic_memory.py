"""Shared-memory folder of an elastic job on one machine: ranks keep their state there, and it outlives them."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from deepspeed.base.constants import ELASTIC_PROGRESS, ELASTIC_STATE
from deepspeed.tools.launcher.processes import memory_folder, own_folder

NO_STEP = 0
_STEPS = struct.Struct("<q")


class ElasticMemory:
    """Shared-memory folder that outlives the ranks, and the count of finished steps in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._progress = folder / ELASTIC_PROGRESS
        self._progress.write_bytes(_STEPS.pack(NO_STEP))

    @property
    def step(self) -> int:
        """Number of steps that the ranks of this machine have finished."""
        return _STEPS.unpack(self._progress.read_bytes())[0]


@contextlib.contextmanager
def elastic_memory() -> Iterator[ElasticMemory]:
    """Create this process's `ElasticMemory`, and remove it at the end of the context."""
    with own_folder(memory_folder()) as folder:
        os.environ[ELASTIC_STATE] = str(folder)
        yield ElasticMemory(folder)
