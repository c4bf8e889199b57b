"""Atomic publication of a checkpoint: a crash at any instant leaves one that loads.

1. The files are written into a hidden staging folder next to the final one, on the same file system.
2. When every rank has finished, the folder is exchanged with the final one in a single operation of the file system, or
   renamed to it when there is none yet.
3. ``latest`` is written under a temporary name and renamed over the old one, last of all.

Meanwhile the folder is locked (``locks``): another job that saves under the same tag gets an error, and the next save
removes the leftovers of a killed one, under any tag.

Where the system cannot exchange two folders, the old one is renamed to a hidden name first; ``find_folder`` knows it.

[Note: a power cut] A checkpoint that replaces an older one is flushed to disk before the older one is removed. One that
replaces nothing is flushed in the background (``flush``): a power failure in that moment can damage it, which its
checksums reveal when it is loaded, while all older checkpoints are intact.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deepspeed.base.logging import logger
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.files import locks
from deepspeed.checkpoint.files.archive_writer import write_errors_at
from deepspeed.checkpoint.files.flush import flush, flush_later, flush_names, wait_for_flushes
from deepspeed.checkpoint.files.tags import check_tag, read_latest, shown
from deepspeed.checkpoint.names import LATEST, LATEST_UNIVERSAL, SCRIPTS, is_ours

_STALE_SECONDS = 3600
"""Age in seconds after the last write at which temporary files, which have no lock file, are removed."""

_STAGING = re.compile(r"\.(.+?)(\.\d+-[0-9a-f]{12})?\.tmp")
"""Names of staging folders (``_hidden``, ``temporary_sibling``), with the name of the checkpoint."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class StagedFolder:
    """A checkpoint folder being written: ``prepare``, write files into ``staging``, then ``commit`` or
    ``discard``.

    These methods are called by one rank per folder, its owner; all ranks write into ``staging``.
    """

    def __init__(self, save_dir: Path, tag: str, *, exclusive: bool = True) -> None:
        """``exclusive=False``: several processes may write the same folder at once; the last commit wins. Otherwise the
        second one gets an error."""
        self.save_dir = save_dir
        self.tag = check_tag(tag)
        self.final = _resolve_link(save_dir / tag)
        self.staging = _hidden(self.final, "tmp") if exclusive else temporary_sibling(self.final)
        self.displaced = _hidden(self.final, "old")
        self._lock: locks.SaveLock | None = None

    @property
    def is_owned(self) -> bool:
        """Return whether this rank prepared the folder, and so has to commit or discard it."""
        return self._lock is not None

    def prepare(self) -> None:
        """Remove leftovers of killed saves, under any tag, and create the staging folder.

        CheckpointError: another process is writing this checkpoint, or an OSError.
        """
        with write_errors_at(self.staging):
            self.final.parent.mkdir(parents=True, exist_ok=True)
            if self.final.exists() and not self.final.is_dir():
                raise CheckpointError(f"{self.final} is a file, but a checkpoint needs a folder of that name")
            self._lock = locks.acquire(_with_suffix(self.staging, locks.SUFFIX), self.final)
            try:
                for folder in self._siblings():
                    _remove_abandoned(folder)
                _recover(self.final, self.displaced)
                _remove(self.staging)
                self.staging.mkdir()
                now = os.stat(self.staging).st_mtime  # file system clock
                _remove_abandoned_files(self.save_dir, now)
            except BaseException:
                self._release()
                raise

    def identity(self) -> int:
        """Return the time of creation [ns] of the empty staging folder, by which ranks check that they see the same
        one; 0 if there is none.

        Scans the parent folder: a network file system may cache that a name does not exist.
        """
        try:
            entries = os.scandir(self.staging.parent)
            return next(each.stat().st_mtime_ns for each in entries if each.name == self.staging.name)
        except (OSError, StopIteration):
            return 0

    def _siblings(self) -> set[Path]:
        """Return the folders of saves with tags of the same depth: for ``epoch1/step5`` also ``epoch2``."""
        depth = self.tag.count("/")
        return {self.final.parent, *(self.save_dir.glob("*/" * depth) if depth else [self.save_dir])}

    def commit(self) -> None:
        """Publish the staged files as the checkpoint; the previous one is removed."""
        self._replace()
        self._release()

    def _replace(self) -> None:
        with write_errors_at(self.final):
            if not self.final.is_dir() and self._claim_final_name():
                flush_later([self.final])
                return
            _keep_foreign(self.final, self.staging)
            flush(self.staging)
            replaced = self.staging
            if not _exchange(self.staging, self.final):
                os.rename(self.final, self.displaced)
                os.rename(self.staging, self.final)
                replaced = self.displaced
            flush_names(self.final.parent)
            shutil.rmtree(replaced, ignore_errors=True)

    def _claim_final_name(self) -> bool:
        """Rename the staging folder to the final name; return False if another process was faster."""
        try:
            os.rename(self.staging, self.final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and self.final.is_dir():
                return False
            raise
        return True

    def discard(self) -> None:
        """Abort; the previous checkpoint stays. Does nothing if not prepared: the staging folder may be another
        job's."""
        if self._lock is not None:
            shutil.rmtree(self.staging, ignore_errors=True)
            self._release()

    def abandon(self) -> None:
        """Abort while other ranks may still be writing: the next save removes the staging folder."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.abandon()

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


@contextmanager
def putting_in_place(staged: StagedFolder, latest: str) -> Iterator[None]:
    """Publish the staging folder at the end of the block, and its name in the file ``latest``; after an error or
    Ctrl-C nothing changes."""
    staged.prepare()
    try:
        yield
    except BaseException:
        staged.discard()
        raise
    staged.commit()
    replace_file(staged.save_dir / latest, staged.tag.encode())
    wait_for_flushes()


def _remove_abandoned(folder: Path) -> None:
    """Remove the staging folders of killed saves; a checkpoint that one had moved away gets its name back."""
    for lock in locks.abandoned(folder):
        staging = _with_suffix(lock.path, ".tmp")
        if staging.is_dir():
            logger.info(f"{staging} removed: an unfinished save by {lock.holder}")
        try:
            _clear(staging)
        except OSError as error:
            logger.info(f"{staging} could not be removed: {error}")
            lock.abandon()
        else:
            lock.release()


def _remove_abandoned_files(folder: Path, now: float) -> None:
    """Remove temporary files of ``latest`` and the like that are over an hour old."""
    beginnings = tuple(f".{name}." for name in (LATEST, LATEST_UNIVERSAL, *SCRIPTS))
    for name in os.listdir(folder):
        if name.startswith(beginnings) and name.endswith(".tmp"):
            path = folder / name
            with suppress(OSError):
                if path.is_file() and now - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()


def _clear(staging: Path) -> None:
    """Remove the staging folder of a killed save; a checkpoint that it had moved away gets its name back."""
    _remove(staging)
    match = _STAGING.fullmatch(staging.name)
    if match is not None:
        final = staging.parent / match[1]
        _recover(final, _hidden(final, "old"))


def _recover(final: Path, displaced: Path) -> None:
    """Recover from a crash between the two renames: restore the displaced checkpoint, or remove it if it was
    replaced."""
    if not displaced.exists():
        return
    if final.exists():
        shutil.rmtree(displaced)
    else:
        os.rename(displaced, final)


def find_folder(load_dir: Path, tag: str) -> Path:
    """Return the folder of a committed checkpoint. CheckpointNotFoundError lists the tags that do exist."""
    final = load_dir / check_tag(tag)
    if os.path.isdir(final):  # False for a path that is too long
        return final
    displaced = _hidden(_resolve_link(final), "old")
    if os.path.isdir(displaced):
        logger.warning(f"{final} is missing: a save was interrupted; loading the previous checkpoint")
        return displaced
    if not load_dir.is_dir():
        raise CheckpointNotFoundError(f"the checkpoint folder {load_dir} does not exist")
    present = sorted(entry.name for entry in load_dir.iterdir() if entry.is_dir() and entry.name[0] != ".")
    named = f", which {load_dir / LATEST} names," if _is_latest(load_dir, tag) else ""
    raise CheckpointNotFoundError(
        f"there is no checkpoint {shown(tag)}{named} in {load_dir}; it holds: "
        f"{', '.join(present[-10:]) or 'no folders'}"
    )


def _is_latest(load_dir: Path, tag: str) -> bool:
    try:
        return read_latest(load_dir) == tag
    except CheckpointError:
        return False


def write_latest(save_dir: Path, tag: str) -> None:
    replace_file(save_dir / LATEST, tag.encode())


def replace_file(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a small file atomically, even if several processes write it at once."""
    written = temporary_sibling(path)
    try:
        with write_errors_at(path):
            with open(written, "wb") as file:
                file.write(content)
            set_mode(written, mode)
            os.replace(written, path)
            flush_later([path])
    finally:
        written.unlink(missing_ok=True)


def set_mode(path: Path, mode: int) -> None:
    """Set the permissions, or log a note: some network shares do not support them."""
    try:
        os.chmod(path, mode)
    except OSError as error:
        logger.info(f"{path} keeps its permissions, which could not be set to {mode:o}: {error}")


def temporary_sibling(path: Path) -> Path:
    """Return a hidden name next to ``path`` that no other process or thread uses, to write under before it is
    renamed."""
    return _hidden(path, f"{os.getpid()}-{uuid.uuid4().hex[:12]}.tmp")


def _hidden(path: Path, suffix: str) -> Path:
    """Return a sibling that patterns such as ``global_step*`` do not match."""
    return path.parent / f".{path.name}.{suffix}"


def _with_suffix(path: Path, suffix: str) -> Path:
    """Return a hidden sibling with another suffix. ``Path.with_suffix`` takes a name of dots for one without."""
    return path.parent / f"{path.name.rpartition('.')[0]}{suffix}"


def _resolve_link(folder: Path) -> Path:
    """Resolve a link to a folder: the replacement is staged next to the target, and the link stays."""
    if not os.path.islink(folder):
        return folder
    try:
        return folder.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise CheckpointError(f"{folder} is a dangling symbolic link: {error}") from error


def _remove(path: Path) -> None:
    """Remove a folder tree, a file or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _keep_foreign(old: Path, new: Path) -> None:
    """Carry over the client's files in the folder: tokenizers, notes, files of other tools."""
    for entry in old.iterdir():
        target = new / entry.name
        if is_ours(entry.name) or target.exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, symlinks=True, copy_function=_link)
        else:
            _link(str(entry), str(target))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):  # file systems without hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically; False if unsupported. renameat2(2), Linux 3.15."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
