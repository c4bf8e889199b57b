"""Checkpoints that are written while training continues.

``save`` copies the state to host memory and returns; a thread of each rank writes its files from the copy. What the
ranks have to know of each other then goes through the process group's store, as collectives belong to training: each
reports that its files are on disk, and the rank that keeps the folder commits it when all have. So at any instant the
newest complete checkpoint is in place, as with a save that waits; a rank that fails leaves the former one.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.archive import naming, write_archive
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.flush import flush
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.snapshot import Snapshot
from deepspeed.checkpoint.writers import StagedFolder
from deepspeed.comm.waiting import Tally
from deepspeed.constants import default_pg_timeout
from deepspeed.utils.logging import logger

POLL_S = 0.02
LAST_S = 10.0  # that a rank waits for the others when its own program has ended


class BackgroundWriter:
    """The saves of one engine that do not wait; one at a time."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._running: _Save | None = None

    def copy(self, contents: Mapping[str, Callable[[], dict[str, Any]]]) -> dict[str, Any]:
        """What the files will hold, copied. The save before must be over."""
        assert self._running is None
        return self._snapshot.take({name: content() for name, content in contents.items()})

    def start(
        self, folder: StagedFolder, contents: Mapping[str, Any], ranks: Ranks, commit: Callable[[], None]
    ) -> None:
        """Writes ``contents`` (file name -> content) into the folder's staging area; then ``commit`` is called on ranks
        that keep a folder. Every rank calls it."""
        self._running = _Save(folder, contents, ranks.keeps_folder, Tally("background save"), commit)
        self._running.start()

    def wait(self, ranks: Ranks | None = None) -> None:
        """Returns when the last checkpoint is in place. With ``ranks`` it is collective, and an error of one rank is
        raised on all.

        Raises:
            CheckpointError: it could not be written; the one before it is untouched.
        """
        running, self._running = self._running, None
        error = running.result() if running is not None else None
        if ranks is None:
            if error is not None:
                raise error
            return
        with ranks.together("writing the checkpoint in the background"):
            if error is not None:
                raise error


@dataclass(slots=True)
class _Outcome:
    error: CheckpointError | None = None


class _Save(threading.Thread):
    """Not a daemon: the interpreter waits for it before it exits."""

    def __init__(
        self,
        folder: StagedFolder,
        contents: Mapping[str, Any],
        keeps_folder: bool,
        tally: Tally,
        commit: Callable[[], None],
    ) -> None:
        super().__init__(name="checkpoint-save", daemon=False)
        self._folder = folder
        self._contents = dict(contents)
        self._keeps_folder = keeps_folder
        self._tally = tally
        self._commit = commit
        self._outcome = _Outcome()

    def result(self) -> CheckpointError | None:
        self.join()
        return self._outcome.error

    def run(self) -> None:
        try:
            self._write()
            self._tally.report(failed=False)
            if self._keeps_folder:
                self._wait_for_all()
                self._commit()
        except Exception as error:  # every kind must reach the training thread
            wrapped = (
                error
                if isinstance(error, CheckpointError)
                else CheckpointError(f"{type(error).__name__}: {error}")
            )
            self._outcome.error = wrapped
            logger.error(f"the checkpoint {self._folder.final} was not saved: {wrapped}")
            self._tally.report(failed=True)
            if self._keeps_folder:
                self._folder.discard()

    def _write(self) -> None:
        for name in list(self._contents):
            path = self._folder.staging / name
            with naming(path):
                write_archive(path, self._contents.pop(name), checksums=True)
                flush(path)

    def _wait_for_all(self) -> None:
        limit = time.monotonic() + default_pg_timeout.total_seconds()
        main_ended: float | None = None
        while True:
            reported, failed = self._tally.read()
            if failed:
                raise CheckpointError(f"{failed} of {self._tally.size} ranks could not write their files")
            if reported == self._tally.size:
                return
            if main_ended is None and not threading.main_thread().is_alive():
                main_ended = time.monotonic()
            late = main_ended is not None and time.monotonic() > main_ended + LAST_S
            if late or time.monotonic() > limit:
                raise CheckpointError(f"only {reported} of {self._tally.size} ranks have written their files")
            time.sleep(POLL_S)


def remove_older(save_dir: Path, keep: int, is_checkpoint: Callable[[Path], bool]) -> list[Path]:
    """Removes all checkpoints of a folder but the ``keep`` newest, by the time at which they were written, and returns
    which. A folder that is no checkpoint, and one behind a link, stay."""
    found = [
        path
        for path in save_dir.iterdir()
        if path.is_dir() and not path.is_symlink() and path.name[0] != "." and is_checkpoint(path)
    ]
    newest_first = sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in newest_first[keep:]:
        aside = path.with_name(
            f".{path.name}.removed"
        )  # a crash while it is removed leaves no half of a checkpoint
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    return newest_first[keep:]
