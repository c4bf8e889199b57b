"""The folder in shared memory of an elastic job on one machine: ranks keep their state there, and it outlives them."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

from deepspeed.base.constants import ELASTIC_PROGRESS, ELASTIC_STATE
from deepspeed.tools.launcher.processes import memory_folder, own_folder

OWNER = "owner"
NO_STEP = 0
_STEPS = struct.Struct("<q")


class Memory:
    """The folder that outlives ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._progress = folder / ELASTIC_PROGRESS
        self._progress.write_bytes(_STEPS.pack(NO_STEP))

    @property
    def step(self) -> int:
        """Steps that the ranks of this machine have finished."""
        return _STEPS.unpack(self._progress.read_bytes())[0]


@contextlib.contextmanager
def memory() -> Iterator[Memory]:
    """This process's folder, as long as the context lasts; folders whose owner has ended are removed."""
    import fcntl  # not on Windows

    place = memory_folder()
    _remove_orphans(place)
    with own_folder(place) as folder:
        # The lock says that the owner lives: process numbers do not, where containers share the memory.
        owner = os.open(folder / OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX)
            os.environ[ELASTIC_STATE] = str(folder)
            yield Memory(folder)
        finally:
            os.close(owner)


def _remove_orphans(place: Path) -> None:
    import fcntl

    for folder in place.glob("deepspeed_launch_*"):
        try:
            owner = os.open(folder / OWNER, os.O_RDWR)
        except OSError:  # another user's, or one that is being made
            continue
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(owner)
