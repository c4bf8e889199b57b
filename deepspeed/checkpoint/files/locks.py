"""Lock files: which process is writing a checkpoint folder, and which folders a killed process left incomplete.

While a folder is written, ``.TAG.lock`` next to it is locked and names the writer. The kernel drops the lock when the
process ends, also over NFS: so a lock file that can be locked belongs to a dead save. On a file system without locks,
saves run unlocked, and nothing counts as abandoned.

[Note: locks of POSIX] They belong to the process, not to the open file: a second ``open`` can lock what the same
process holds, and any ``close`` of the file drops the lock. So a process checks its own locks before it opens such a
file. Forked processes, such as data loader workers, do not inherit the lock.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from deepspeed.base.logging import warning_once
from deepspeed.checkpoint.errors import CheckpointError

SUFFIX = ".lock"

_PATIENCE = 1.0
"""Seconds to wait for a lock: another job may be probing whether it is abandoned."""

_MAX_BYTES = 1000
_own: WeakValueDictionary[tuple[int, int], SaveLock] = WeakValueDictionary()
_guard = threading.Lock()


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that wrote a lock file, and when, in ISO format with the time zone."""

    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class SaveLock:
    """A lock held by this process until ``release``, ``abandon`` or garbage collection."""

    def __init__(self, path: Path, file: FileIO | None, holder: Holder) -> None:
        self.path = path
        self.holder = holder
        self._file = file  # None where the file system has no locks
        if file is not None:
            _own[_identity(os.fstat(file.fileno()))] = self

    def release(self) -> None:
        """Remove the file and drop the lock."""
        self._end(remove=True)

    def abandon(self) -> None:
        """Drop the lock, but keep the file for ``abandoned``."""
        self._end(remove=False)

    def _end(self, *, remove: bool) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with _guard:
            _own.pop(_identity(os.fstat(file.fileno())), None)
            if remove:
                with suppress(OSError):
                    os.unlink(self.path)
            file.close()


def acquire(path: Path, folder: Path) -> SaveLock:
    """Lock the file ``path``, created if needed, to write the checkpoint ``folder``.

    CheckpointError: another process, or another save of this one, is writing it.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        with _guard:
            found = _try(path)
        if isinstance(found, SaveLock):
            return found
        if time.monotonic() > deadline:
            own = " (this process)" if found == _this_process(found.since) else ""
            raise CheckpointError(
                f"{folder} is being written by {found}{own}: two saves cannot write the same checkpoint at "
                "once. Give each job its own save_dir or tags, or stop the other job"
            )
        time.sleep(_PATIENCE / 20)


def abandoned(folder: Path) -> Iterator[SaveLock]:
    """Yield the locks in ``folder`` whose process was killed or left its save, each now held by this process."""
    for name in os.listdir(folder):
        if name.startswith(".") and name.endswith(SUFFIX):
            with _guard:
                found = _try_abandoned(folder / name)
            if found is not None:
                yield found


def _try(path: Path) -> SaveLock | Holder:
    own = _held_here(path)
    if own is not None:
        return own.holder
    while True:
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
        free = _lock(file, path)
        holder = _this_process(datetime.now().astimezone().isoformat(timespec="seconds"))
        if free is None:
            file.close()
            path.unlink(missing_ok=True)
            return SaveLock(path, None, holder)
        if not free:
            other = _read(file) or Holder("an unknown host", 0, "a moment ago")
            file.close()
            return other
        if _is_at(path, file):  # else the holder removed it in the meantime
            # One write, never shorter than the old content: if killed at any instant, the file still names a holder.
            record = json.dumps(asdict(holder)).encode()
            os.pwrite(file.fileno(), record.ljust(os.fstat(file.fileno()).st_size), 0)
            return SaveLock(path, file, holder)
        file.close()


def _try_abandoned(path: Path) -> SaveLock | None:
    if path.is_symlink() or _held_here(path) is not None:
        return None
    with suppress(OSError):
        file = FileIO(os.open(path, os.O_RDWR), "r+")
        holder = _read(file)  # another program may use such names
        if holder is not None and _lock(file, path) and _is_at(path, file):
            return SaveLock(path, file, holder)
        file.close()
    return None


def _lock(file: FileIO, path: Path) -> bool | None:
    """Lock the file; False if another process holds it; None, with a warning, if locks are unsupported."""
    try:
        import fcntl  # not on every system

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if getattr(error, "errno", None) in (errno.EAGAIN, errno.EACCES):
            return False
        warning_once(
            f"files in {path.parent} cannot be locked ({error}): another job saving under the same tag will not be "
            "detected, and leftovers of a killed save are removed only by the next save of the same tag"
        )
        return None
    return True


def _read(file: FileIO) -> Holder | None:
    """Return the holder that the file names; None if it is not our lock file."""
    file.seek(0)
    try:
        found: Any = json.loads(file.read(_MAX_BYTES))
        return Holder(host=str(found["host"]), pid=int(found["pid"]), since=str(found["since"]))
    except (ValueError, LookupError, TypeError):
        return None


def _held_here(path: Path) -> SaveLock | None:
    try:
        own = _own.get(_identity(os.stat(path)))
    except OSError:
        return None
    # A forked process has a copy of the table.
    return own if own is not None and own.holder.pid == os.getpid() else None


def _is_at(path: Path, file: FileIO) -> bool:
    try:
        return _identity(os.stat(path)) == _identity(os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _this_process(since: str) -> Holder:
    return Holder(socket.gethostname(), os.getpid(), since)
