"""Registry of this user's runs on this machine: a folder in shared memory with a small file per run, written by rank 0.

Readers remove the files of processes that have ended, also if their process id is in use again.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

VARIABLE = "DEEPSPEED_RUNTIME_DIR"
"""Environment variable that overrides the folder of these files."""

SHARED_MEMORY = Path("/dev/shm")


def runtime_folder() -> Path:
    """Return the registry's folder. It does not depend on TMPDIR or XDG_RUNTIME_DIR, which may differ between a job and
    a terminal, unless there is no shared memory."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return base / f"deepspeed-runs-{os.getuid()}"


def make_private(folder: Path) -> None:
    """Create a folder that only this user can write to. OSError: it cannot be created, or others can write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder that only this user writes to")


class JobEntry:
    """The registry file of one run. ``metadata``: constant for the run."""

    def __init__(self, metadata: dict[str, Any], folder: Path | None = None) -> None:
        self.folder = folder or runtime_folder()
        self.metadata = {
            **metadata,
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
            "cwd": os.getcwd(),
        }
        self.path = self.folder / f"{os.getpid()}-{id(self)}.json"
        self._partial = self.path.with_suffix(".new")
        self._is_private = False

    def write(self, state: dict[str, Any]) -> None:
        """Replace the file atomically. Errors are ignored: only `ds top` misses the run."""
        text = json.dumps({**self.metadata, **state})
        try:
            if not self._is_private:
                make_private(self.folder)
                self._is_private = True
            self._partial.write_text(text, encoding="utf-8")
            self._partial.replace(self.path)
        except OSError:
            self._is_private = False  # check again next time: the folder may have been removed

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def running_jobs(
    folder: Path | None = None, started: Callable[[int], float | None] | None = None
) -> list[dict[str, Any]]:
    """Return the last entries of this user's runs, oldest first."""
    folder = folder or runtime_folder()
    found = []
    if not folder.is_dir() or folder.lstat().st_uid != os.getuid():
        return []
    for path in folder.glob("*.json"):
        try:
            job = json.loads(path.read_text(encoding="utf-8"))
            began = (started or start_of)(job["pid"])
            if began is None or abs(began - job["started"]) > 1.0:
                path.unlink(missing_ok=True)
                continue
        except (OSError, ValueError, KeyError, TypeError):  # removed meanwhile, or not a registry file
            continue
        found.append(job)
    return sorted(found, key=lambda job: (job["started"], job["pid"]))


def start_of(pid: int) -> float | None:
    """Return the start time of a process in seconds since the epoch; None if it does not run."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
