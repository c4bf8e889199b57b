"""Checkpoints that are written while training continues.

``save`` copies the state to host memory and returns; a thread of each rank does the rest. What the ranks have to know
of each other goes through the process group's store, as collectives belong to training: the threads take the steps of
a save that waits (``save._save_copied``), and each ends with the same result as the others. So at any instant the
newest complete checkpoint is in place; a rank that fails leaves the former one.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.base.logging import logger
from deepspeed.checkpoint.errors import CheckpointError, FailedElsewhere
from deepspeed.checkpoint.files.snapshot import Snapshot
from deepspeed.checkpoint.ranks import Ranks, StoreRanks


class BackgroundWriter:
    """The saves of one engine that do not wait; one at a time."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self._thread_ranks: StoreRanks | None = None
        self._running: _Save | None = None

    def prepare(self, values: dict[str, Any]) -> None:
        """``values`` are like those that will be copied: fetch the memory for them meanwhile."""
        self.snapshot.prepare(values)

    def copy(self, values: dict[str, Any]) -> dict[str, Any]:
        """``values`` in memory of their own. The save before must be over."""
        assert self._running is None
        return self.snapshot.take(values)

    def start(self, work: Callable[[Ranks], None], ranks: Ranks) -> None:
        """Does ``work`` in a thread, with ranks of which only the threads know. Every rank calls it."""
        if self._thread_ranks is None:
            self._thread_ranks = StoreRanks(node_local=ranks.node_local)
        self._thread_ranks.begin()
        self._running = _Save(work, self._thread_ranks)
        self._running.start()

    def wait(self) -> None:
        """Returns when the last checkpoint is in place. All ranks are told the same.

        Raises:
            CheckpointError: it could not be written; the one before it is untouched.
        """
        running, self._running = self._running, None
        if running is None:
            return
        running.join()
        if running.error is not None:
            raise running.error

    def close(self) -> None:
        """``wait``; the memory of the copy is given back."""
        try:
            self.wait()
        finally:
            self.snapshot.release()


class _Save(threading.Thread):
    """Not a daemon: the interpreter waits for it before it exits."""

    def __init__(self, work: Callable[[Ranks], None], ranks: StoreRanks) -> None:
        super().__init__(name="checkpoint-save", daemon=False)
        self._work: Callable[[Ranks], None] | None = work
        self._ranks = ranks
        self.error: CheckpointError | None = None

    def run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            work(self._ranks)
        except Exception as error:  # every kind must reach the training thread
            own = isinstance(error, CheckpointError)
            self.error = error if own else CheckpointError(f"{type(error).__name__}: {error}")
            if self._ranks.keeps_folder or not isinstance(error, FailedElsewhere):
                logger.error(f"a checkpoint was not saved: {self.error}")
        self._ranks.end()


def remove_older(
    save_dir: Path, keep: int, written_at: Callable[[Path], int | None], *, newest: Path | None = None
) -> list[Path]:
    """Remove all checkpoints of a folder but the ``keep`` newest, and return which.

    Args:
        written_at: when a folder's checkpoint was written [ns]; None: it is no checkpoint, and stays, as one behind a
            link does.
        newest: what has just been saved, whatever the clocks say.
    """
    times: dict[Path, int] = {}
    for path in save_dir.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name[0] != ".":
            written = written_at(path)
            if written is not None:
                times[path] = written
    newest_first = sorted(times, key=lambda path: (path == newest, times[path]), reverse=True)
    for aside in save_dir.glob(".*.removed"):  # of a process that was killed
        shutil.rmtree(aside, ignore_errors=True)
    for path in newest_first[keep:]:
        # A crash while it is removed leaves no half of a checkpoint.
        aside = path.with_name(f".{path.name}.removed")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    return newest_first[keep:]
