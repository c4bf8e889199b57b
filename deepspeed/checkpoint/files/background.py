"""Asynchronous saves: checkpoints written while training continues.

``save`` copies the state to host memory and returns; a thread of each rank does the rest. The threads coordinate
through the process group's store, as collectives belong to the training thread; they take the steps of a synchronous
save (``save._save_copied``), and all end with the same result. So at any instant the newest complete checkpoint is in
place; if a rank fails, the previous one stays.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.base.logging import logger
from deepspeed.checkpoint.errors import CheckpointError, FailedElsewhere
from deepspeed.checkpoint.files.flush import WriterThread
from deepspeed.checkpoint.files.snapshot import Snapshot
from deepspeed.checkpoint.ranks import Ranks, StoreRanks


class BackgroundWriter:
    """The asynchronous saves of one engine, one at a time."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self._thread_ranks: StoreRanks | None = None
        self._running: WriterThread | None = None

    def prepare(self, values: dict[str, Any]) -> None:
        """Allocate host memory in a thread for a later copy of values like ``values``."""
        self.snapshot.prepare(values)

    def copy(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``values`` in host memory. No save may be in progress."""
        assert self._running is None
        return self.snapshot.take(values)

    def start(self, work: Callable[[Ranks], None], ranks: Ranks) -> None:
        """Run ``work`` in a thread, with ``Ranks`` that only these threads use. Every rank calls it."""
        if self._thread_ranks is None:
            self._thread_ranks = StoreRanks(node_local=ranks.node_local)
        self._thread_ranks.begin()
        self._running = WriterThread("checkpoint-save", partial(_save, work, self._thread_ranks))
        self._running.start()

    def wait(self) -> None:
        """Return when the last checkpoint is in place. The outcome is the same on all ranks.

        Raises:
            CheckpointError: it could not be written; the previous one is untouched.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Call ``wait``, and free the memory of the copy."""
        try:
            self.wait()
        finally:
            self.snapshot.release()


def _save(work: Callable[[Ranks], None], ranks: StoreRanks) -> None:
    try:
        work(ranks)
    except Exception as error:
        own = isinstance(error, CheckpointError)
        failed = error if own else CheckpointError(f"{type(error).__name__}: {error}")
        if ranks.keeps_folder or not isinstance(error, FailedElsewhere):
            logger.error(f"saving a checkpoint failed: {failed}")
        raise failed from error.__cause__
    finally:
        ranks.end()


def remove_older(
    save_dir: Path, keep: int, written_at: Callable[[Path], int | None], *, newest: Path | None = None
) -> list[Path]:
    """Remove all checkpoints of a folder but the ``keep`` newest; return the removed ones.

    Args:
        written_at: time a folder's checkpoint was written [ns]; None: not a checkpoint, so it is kept, as are symbolic
            links.
        newest: the checkpoint just saved, regardless of clock skew.
    """
    times: dict[Path, int] = {}
    for path in save_dir.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name[0] != ".":
            written = written_at(path)
            if written is not None:
                times[path] = written
    newest_first = sorted(times, key=lambda path: (path == newest, times[path]), reverse=True)
    for aside in save_dir.glob(".*.removed"):  # left by a killed process
        shutil.rmtree(aside, ignore_errors=True)
    for path in newest_first[keep:]:
        # Rename first: a crash during removal then leaves no partial checkpoint.
        aside = path.with_name(f".{path.name}.removed")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    return newest_first[keep:]
