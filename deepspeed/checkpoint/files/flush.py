"""Flushing written files to disk in the background, while training continues.

A write first goes to the page cache: every process sees the data, and it survives any crash of the processes, but not
a power failure. `fsync` waits until the data is on disk, which takes longer than writing it. So a save that replaces
nothing queues its files for a thread and returns. Files are flushed in queue order; the interpreter waits for them at
exit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from deepspeed.base.logging import logger
from deepspeed.checkpoint.errors import CheckpointError

_pending: list[WriterThread] = []


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
    queued = WriterThread("checkpoint-flush", partial(_flush_all, list(paths), after=_pending[-1:]))
    queued.start()  # before others can wait for it
    _pending.append(queued)


def wait_for_flushes() -> None:
    """Return when all queued files are on disk. CheckpointError: a flush failed."""
    while waiting := list(_pending):  # another thread may wait as well
        waiting[0].join()
        with suppress(ValueError):
            _pending.remove(waiting[0])
        waiting[0].result()


def _flush_all(paths: list[Path], after: list[WriterThread]) -> None:
    while after:
        after.pop().join()
    for path in paths:
        try:
            with suppress(FileNotFoundError):  # the client may have rotated its checkpoints
                flush(path)
                flush_names(path.parent)
        except OSError as error:
            failed = CheckpointError(
                f"{path} was written, but flushing it to disk failed ({error.strerror or error}): it "
                "may not survive a power failure. Free space or use another disk, and save again"
            )
            logger.error(failed)
            raise failed from error


class WriterThread(threading.Thread):
    """A thread that runs ``work``. Not a daemon: the interpreter waits for it at exit."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=False)
        self._work: Callable[[], None] | None = work
        self._error: Exception | None = None

    def run(self) -> None:
        work, self._work = self._work, None  # what it holds is freed with it
        assert work is not None
        try:
            work()
        except Exception as error:  # any error must reach the thread that waits
            self._error = error

    def result(self) -> None:
        """Wait for the work, and raise its exception."""
        self.join()
        if self._error is not None:
            raise self._error


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pending.clear)  # threads do not survive a fork
