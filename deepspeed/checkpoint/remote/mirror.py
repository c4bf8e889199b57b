"""Checkpoints below a URL, and the local copies of those on their way there or back.

A save is written and committed to a local folder, as any other. Then a thread of each machine uploads the files of its
ranks, and after them a *receipt*: an object in the tag's folder that names the save and lists the files. A tag is
complete when all receipts of one save are there; only then `latest` names it. So at every instant the newest complete
checkpoint is what loads. What could not be uploaded stays here and is tried again at the next save, or by the next
process that uses the URL on this machine.
"""

from __future__ import annotations

import atexit
import getpass
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed.base.logging import log_dist, logger
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.files.tags import check_tag, shown
from deepspeed.checkpoint.files.writers import replace_file, write_latest
from deepspeed.checkpoint.names import LATEST, SCRIPTS
from deepspeed.checkpoint.remote.store import Store
from deepspeed.checkpoint.save_ids import new_id

if TYPE_CHECKING:
    from deepspeed.checkpoint.ranks import Ranks

RECEIPT = ".uploaded."
"""Beginning of the names of receipts; the number of the rank that uploads follows."""
_PROGRESS = ".uploading."
"""Beginning of the names of objects that tell that a rank uploads its part of a save: what is there is of that save."""
_PENDING = ".pending"
_SAVE = ".save"
"""Holds the id of the save whose files a local folder has."""
_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """One machine's part of the upload of a save. ``parts``: the ranks that upload something of it."""

    tag: str
    save: int
    rank: int
    parts: Sequence[int]
    files: Sequence[str]
    latest: bool
    keep_last: int | None


class Mirror:
    """The checkpoints of one URL, for all ranks of a machine."""

    def __init__(self, url: str, staging: str | None = None) -> None:
        """``staging``: the folder for local copies of all URLs; a disk of the machine, not a shared one."""
        self.store = Store(url)
        base = Path(staging) if staging else _default_staging()
        self.local = base / hashlib.blake2b(self.store.url.encode(), digest_size=8).hexdigest()
        self._thread: threading.Thread | None = None
        self._running = False
        self._error: CheckpointError | None = None
        self._turn = threading.Lock()
        _before_the_interpreter_ends(self)

    # ---- there

    def committed(
        self, folder: Path, tag: str, ranks: Ranks, *, latest: bool = True, keep_last: int | None = None
    ) -> None:
        """Upload a checkpoint that has just been committed to ``folder`` on this machine. Collective; returns at once.

        Machines may hold the same file: the first rank that has it uploads it.
        """
        own = sorted(_relative_files(folder)) if ranks.keeps_folder else []
        reports = ranks.gather((new_id(), own))
        owner: dict[str, int] = {}
        for rank, (_, files) in enumerate(reports):
            for file in files:
                owner.setdefault(file, rank)
        if not ranks.keeps_folder:
            return
        upload = Upload(
            tag=tag,
            save=reports[0][0],
            rank=ranks.rank,
            parts=sorted(set(owner.values())),
            files=[file for file in own if owner[file] == ranks.rank],
            latest=latest,
            keep_last=keep_last,
        )
        (folder / _SAVE).write_text(str(upload.save))
        if upload.files:
            self._note(upload).parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._note(upload), json.dumps(asdict(upload)).encode())
        self.resume()

    def resume(self) -> None:
        """Upload what earlier saves, also those of earlier processes, have left here. Returns at once."""
        with self._turn:
            if self._running or not any(self._pending()):
                return
            self._running = True
            self._thread = threading.Thread(
                target=self._upload_pending, name="checkpoint-upload", daemon=True
            )
            self._thread.start()

    def wait(self) -> None:
        """Return when all of this machine's uploads are done. CheckpointError: one could not be done; it stays here."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish_uploads(self) -> None:
        """Upload what was left here, so that the newest checkpoint is there; what fails is logged and stays."""
        self.resume()
        with suppress(CheckpointError):
            self.wait()

    def _note(self, upload: Upload) -> Path:
        return self.local / _PENDING / f"{upload.save}.{upload.rank}.json"

    def _pending(self) -> Iterator[Upload]:
        """Yield the uploads that are not done, the oldest first."""
        notes = sorted((self.local / _PENDING).glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for note in notes:
            with suppress(FileNotFoundError):
                yield Upload(**json.loads(note.read_bytes()))

    def _upload_pending(self) -> None:
        tried: set[tuple[int, int]] = set()
        self._error = None
        while (upload := self._next(tried)) is not None:
            tried.add((upload.save, upload.rank))
            try:
                self._upload(upload)
            except Exception as error:
                if not self._is_current(upload):
                    continue
                self._error = CheckpointError(
                    f"the checkpoint {upload.tag!r} is not in {self.store.url} yet: {error}. It is in "
                    f"{self.local / upload.tag}, and is uploaded by the next save or run with this URL"
                )
                logger.error(str(self._error))

    def _next(self, tried: set[tuple[int, int]]) -> Upload | None:
        """Return the oldest upload that was not tried. If there is none the thread ends, and a later one is needed."""
        with self._turn:
            for upload in self._pending():
                if (upload.save, upload.rank) not in tried:
                    return upload
            self._running = False
            return None

    def _upload(self, upload: Upload) -> None:
        if not self._is_current(upload):
            return
        folder = self.local / upload.tag
        sizes = {name: (folder / name).stat().st_size for name in upload.files}
        there = self._begin(upload)
        missing = [name for name, size in sizes.items() if there.get(name) != size]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda name: self.store.upload(folder / name, f"{upload.tag}/{name}"), missing))
        if not self._is_current(upload):  # what was sent last may be of the newer save
            return
        receipt = _Receipt(save=upload.save, parts=list(upload.parts), files=sizes, time=time.time())
        self.store.write(f"{upload.tag}/{RECEIPT}{upload.rank}", json.dumps(asdict(receipt)).encode())
        self._publish(upload)
        self._note(upload).unlink(missing_ok=True)
        log_dist(f"the checkpoint {upload.tag} is in {self.store.url}", ranks=[upload.rank])
        self._remove_local(upload)

    def _is_current(self, upload: Upload) -> bool:
        """Return whether the local folder still holds that save; forget the upload if a newer one has replaced it."""
        if _saved_as(self.local / check_tag(upload.tag)) == upload.save:
            return True
        self._note(upload).unlink(missing_ok=True)
        return False

    def _begin(self, upload: Upload) -> dict[str, int]:
        """Return the sizes of the files that are there already. Those of a former save of the tag are removed first: a
        size does not tell them apart."""
        prefix = f"{upload.tag}/"
        there = {
            name[len(prefix) :]: size for name, size in self.store.sizes().items() if name.startswith(prefix)
        }
        progress, receipt = f"{_PROGRESS}{upload.save}.{upload.rank}", f"{RECEIPT}{upload.rank}"
        if progress in there:
            return there
        for name in (receipt, *upload.files):  # the receipt first, so that no half of it looks complete
            if name in there:
                self.store.remove(prefix + name)
        self.store.write(prefix + progress, b"")
        return {}

    def _publish(self, upload: Upload) -> None:
        """Let `latest` name the tag and remove older ones, if this machine is the last one that uploads."""
        sizes = self.store.sizes()
        if self._complete_save(upload.tag, sizes) is None:
            return
        for name in sizes:
            if name.startswith(f"{upload.tag}/{_PROGRESS}"):
                self.store.remove(name)
        if upload.latest:
            for script in SCRIPTS:
                if (self.local / script).is_file():
                    self.store.upload(self.local / script, script)
            self.store.write(LATEST, upload.tag.encode())
        if upload.keep_last is not None:
            complete = self._complete(sizes)
            newest_first = sorted(complete, key=lambda tag: complete[tag], reverse=True)
            self._remove(newest_first[upload.keep_last :], sizes)

    def _remove(self, tags: Sequence[str], sizes: Mapping[str, int]) -> None:
        names = [name for name in sizes if name.rpartition("/")[0] in tags]
        for name in sorted(names, key=lambda name: RECEIPT not in name):  # an incomplete tag does not load
            self.store.remove(name)
        for tag in tags:
            self.store.remove_folder(tag)

    def _remove_local(self, done: Upload) -> None:
        """Remove the copies of earlier saves; that of the last one stays, from which a restart is quick."""
        waiting = {each.tag for each in self._pending()}
        for mark in list(self.local.rglob(_SAVE)):
            tag = mark.parent.relative_to(self.local).as_posix()
            if tag != done.tag and tag not in waiting and mark.stat().st_mtime_ns < self._age(done):
                shutil.rmtree(mark.parent, ignore_errors=True)

    def _age(self, upload: Upload) -> int:
        with suppress(FileNotFoundError):
            return (self.local / upload.tag / _SAVE).stat().st_mtime_ns
        return 0

    # ---- and back

    def complete(self) -> dict[str, float]:
        """Return the complete tags with the time [s since 1970] at which each was."""
        return self._complete(self.store.sizes())

    def _complete(self, sizes: Mapping[str, int]) -> dict[str, float]:
        tags = {name.rpartition("/")[0] for name in sizes if name.rpartition("/")[2].startswith(RECEIPT)}
        found = {tag: self._complete_save(tag, sizes) for tag in sorted(tags)}
        return {tag: save.time for tag, save in found.items() if save is not None}

    def _complete_save(self, tag: str, sizes: Mapping[str, int]) -> _CompleteSave | None:
        """Return the save of which all ranks that uploaded a part have left receipts, and the files are there."""
        receipts = [
            receipt
            for name in sizes
            if name.startswith(f"{tag}/{RECEIPT}") and "/" not in name[len(tag) + 1 :]
            if (receipt := self._receipt(name)) is not None
        ]
        for number in {receipt.save for receipt in receipts}:
            own = [receipt for receipt in receipts if receipt.save == number]
            files = {name: size for receipt in own for name, size in receipt.files.items()}
            there = all(sizes.get(f"{tag}/{name}") == size for name, size in files.items())
            if there and len(own) == len(own[0].parts):
                return _CompleteSave(number, files, max(receipt.time for receipt in own))
        return None

    def _receipt(self, name: str) -> _Receipt | None:
        """Return a receipt; None if it is gone or is none: whoever writes to the bucket may have put anything there."""
        content = self.store.read(name)
        try:
            return _Receipt(**json.loads(content)) if content is not None else None
        except (ValueError, TypeError, AttributeError):
            logger.warning(f"{self.store.url}/{name} is no receipt of a checkpoint: it is not counted")
            return None

    def has_any(self) -> bool:
        """Return whether a checkpoint is there, or here on its way."""
        return LATEST in self.store.sizes() or any(self._pending())

    def fetch(self, tag: str | None = None) -> str | None:
        """Copy a complete tag into ``local``, where its files are not there yet, and return it; None if no tag is
        given and none is known.

        CheckpointNotFoundError: there is no such tag. CheckpointError: its upload has not ended.
        """
        sizes = self.store.sizes()
        if tag is None and (tag := self._last(sizes)) is None:
            (self.local / LATEST).unlink(missing_ok=True)
            return None
        check_tag(tag, source=f"{self.store.url}: the tag")
        folder = self.local / tag
        if any(each.tag == tag for each in self._pending()):
            raise CheckpointError(
                f"{folder} is a newer save of {tag!r} than {self.store.url} has, and could not be uploaded: load it "
                "from that folder, or remove it"
            )
        save = self._complete_save(tag, sizes) or self._copied_by_hand(tag, sizes)
        for name in save.files:
            if name.startswith("/") or ".." in name.split("/") or "\\" in name:
                raise CheckpointError(
                    f"{self.store.url}/{tag}: {shown(name)} is no file in a checkpoint's folder"
                )
        if save.number is None or _saved_as(folder) != save.number:
            shutil.rmtree(folder, ignore_errors=True)
        missing = [name for name, size in save.files.items() if _size(folder / name) != size]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda name: self.store.download(f"{tag}/{name}", folder / name), missing))
        if save.number is not None:
            (folder / _SAVE).write_text(str(save.number))
        write_latest(self.local, tag)
        return tag

    def _last(self, sizes: Mapping[str, int]) -> str | None:
        """Return the tag that `latest` names; the newest complete one while that is replaced."""
        content = self.store.read(LATEST) if LATEST in sizes else None
        if content is None:
            return None
        tag = content.decode(errors="replace").strip()
        replaced = any(name.startswith(f"{tag}/{_PROGRESS}") for name in sizes)
        if not replaced or self._complete_save(tag, sizes):
            return tag
        complete = self._complete(sizes)
        newest = max(complete, key=lambda each: complete[each], default=tag)
        logger.warning(f"{self.store.url}: the upload of {tag!r} has not ended; {newest!r} is loaded instead")
        return newest

    def _copied_by_hand(self, tag: str, sizes: Mapping[str, int]) -> _CompleteSave:
        """Return all that is below a tag that no upload of ours made. Raises as `fetch` does."""
        below = {name[len(tag) + 1 :]: size for name, size in sizes.items() if name.startswith(f"{tag}/")}
        if below and not any(name.startswith((RECEIPT, _PROGRESS)) for name in below):
            return _CompleteSave(None, below, 0.0)
        known = ", ".join(self._complete(sizes)) or "none"
        if not below:
            raise CheckpointNotFoundError(
                f"{self.store.url} has no checkpoint {tag!r}; complete there: {known}"
            )
        raise CheckpointError(
            f"{self.store.url}/{tag}: its upload has not ended; complete there: {known}. The machine that saved it "
            "still has it, and resumes the upload when a run uses this URL"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Receipt:
    """Record of a finished upload by one rank: its files with their sizes [bytes], and when [s since 1970]. ``parts``:
    the ranks that upload something of this save."""

    save: int
    parts: list[int]
    files: dict[str, int]
    time: float

    def __post_init__(self) -> None:
        """TypeError: it was not written by an upload."""
        numbers = (self.save, self.time, *self.parts, *self.files.values())
        if not all(isinstance(number, (int, float)) for number in numbers):
            raise TypeError("numbers are expected")


@dataclass(frozen=True, slots=True)
class _CompleteSave:
    """One save that is complete there: its id [None: not known], sizes of its files, when it was complete."""

    number: int | None
    files: Mapping[str, int]
    time: float


def local_copy(url: str, tag: str | None = None, staging: str | None = None) -> str:
    """Return the local folder into which ``tag`` [default: the last] of a URL was fetched. Not collective."""
    mirror = Mirror(url, staging)
    mirror.finish_uploads()
    mirror.fetch(tag)
    return str(mirror.local)


def _default_staging() -> Path:
    """Return a folder of this user's alone. CheckpointError: somebody else has made it."""
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    folder = Path(tempfile.gettempdir()) / f"deepspeed-checkpoints-{user}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid != user:
        raise CheckpointError(f"{folder} belongs to another user: set checkpoint.staging_folder")
    return folder


def _relative_files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and path.name != _SAVE:
            yield path.relative_to(folder).as_posix()


def _saved_as(folder: Path) -> int | None:
    try:
        return int((folder / _SAVE).read_text())
    except (OSError, ValueError):
        return None


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _before_the_interpreter_ends(mirror: Mirror) -> None:
    """Wait for uploads where nobody has. Handlers of `atexit` run too late: pools of threads are closed by then."""
    known = weakref.ref(mirror)

    def finish() -> None:
        if (left := known()) is not None:
            with suppress(CheckpointError):  # which was logged
                left.wait()

    getattr(threading, "_register_atexit", atexit.register)(finish)
