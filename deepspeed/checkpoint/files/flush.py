"""Flushing written files to disk in the background, while training continues.

A write first goes to the page cache: every process sees the data, and it survives any crash of the processes, but not
a power failure. `fsync` waits until the data is on disk, which takes longer than writing it. So a save that replaces
nothing queues its files for a thread and returns. Files are flushed in queue order; the interpreter waits for them at
exit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from deepspeed.base.logging import logger
from deepspeed.checkpoint.errors import CheckpointError

_pending: list[_Flush] = []


def flush(path: Path) -> None:
    """Flush this file, or this folder and everything below it, to disk. OSError: the flush failed."""
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            flush(entry)
        flush_names(path)
    elif path.is_file():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def flush_names(folder: Path) -> None:
    """Make renames and new names in ``folder`` durable; only POSIX systems can open one."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_later(paths: Iterable[Path]) -> None:
    """Flush these files and their names in the background, in this order. Files removed in the meantime are skipped.

    An error is logged when it occurs, and raised by the next ``wait_for_flushes``.
    """
    queued = _Flush(list(paths), after=_pending[-1:])
    queued.start()  # before others can wait for it
    _pending.append(queued)


def wait_for_flushes() -> None:
    """Return when all queued files are on disk. CheckpointError: a flush failed."""
    while waiting := list(_pending):  # another thread may wait as well
        done = waiting[0]
        done.join()
        with suppress(ValueError):
            _pending.remove(done)
        if done.error is not None:
            raise done.error


class _Flush(threading.Thread):
    def __init__(self, paths: list[Path], after: list[_Flush]) -> None:
        super().__init__(name="checkpoint-flush", daemon=False)
        self.paths = paths
        self.after = after
        self.error: CheckpointError | None = None

    def run(self) -> None:
        while self.after:
            self.after.pop().join()
        for path in self.paths:
            try:
                with suppress(FileNotFoundError):  # the client may have rotated its checkpoints
                    flush(path)
                    flush_names(path.parent)
            except OSError as error:
                self.error = CheckpointError(
                    f"{path} was written, but flushing it to disk failed ({error.strerror or error}): it "
                    "may not survive a power failure. Free space or use another disk, and save again"
                )
                logger.error(self.error)
                return


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pending.clear)  # threads do not survive a fork
