"""Checkpoints below a URL, and their local copies during upload and download.

A save is committed to a local folder as usual. Then a thread of each machine uploads the files of its ranks, and
after them a *receipt*: an object in the tag's folder that names the save and lists the files. A tag is complete when
all receipts of one save exist; only then `latest` names it. So at every instant the newest complete checkpoint is
loaded. Failed uploads stay in the local folder and are retried at the next save, or by the next process that uses the
URL on this machine.
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
from deepspeed.checkpoint.files.tags import check_tag, given_tag, shown
from deepspeed.checkpoint.files.writers import replace_file, write_latest
from deepspeed.checkpoint.names import LATEST, SCRIPTS
from deepspeed.checkpoint.remote.store import Store
from deepspeed.checkpoint.save_ids import new_id

if TYPE_CHECKING:
    from deepspeed.checkpoint.ranks import Ranks

RECEIPT = ".uploaded."
"""Name prefix of receipts; the uploading rank's number follows."""
_PROGRESS = ".uploading."
"""Name prefix of objects that mark a rank's upload of a save in progress: the uploaded files are of that save."""
_PENDING = ".pending"
_SAVE = ".save"
"""Name of the file with the id of the save in a local folder."""
_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """One machine's part of the upload of a save. ``parts``: the ranks that upload files of it."""

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
        """``staging``: the folder for local copies of all URLs; on a local disk, not a shared one."""
        self.store = Store(url)
        base = Path(staging) if staging else _default_staging()
        self.local = base / hashlib.blake2b(self.store.url.encode(), digest_size=8).hexdigest()
        self._thread: threading.Thread | None = None
        self._running = False
        self._error: CheckpointError | None = None
        self._turn = threading.Lock()
        _finish_at_exit(self)

    # ---- Upload

    def committed(
        self, folder: Path, tag: str, ranks: Ranks, *, latest: bool = True, keep_last: int | None = None
    ) -> None:
        """Start the upload of a checkpoint just committed to ``folder`` on this machine. Collective; returns at once.

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
        """Start pending uploads of earlier saves, also of earlier processes. Returns at once."""
        with self._turn:
            if self._running or not any(self._pending()):
                return
            self._running = True
            self._thread = threading.Thread(
                target=self._upload_pending, name="checkpoint-upload", daemon=True
            )
            self._thread.start()

    def wait(self) -> None:
        """Wait for all of this machine's uploads. CheckpointError: one failed; its files stay local."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish_uploads(self) -> None:
        """Finish pending uploads, so that the store has the newest checkpoint; failures are logged and stay pending."""
        self.resume()
        with suppress(CheckpointError):
            self.wait()

    def _note(self, upload: Upload) -> Path:
        return self.local / _PENDING / f"{upload.save}.{upload.rank}.json"

    def _pending(self) -> Iterator[Upload]:
        """Yield the pending uploads, oldest first."""
        notes = sorted((self.local / _PENDING).glob("*.json"), key=_modified_ns)
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
                    f"{self.local / upload.tag}; the next save or run with this URL uploads it"
                )
                logger.error(str(self._error))

    def _next(self, tried: set[tuple[int, int]]) -> Upload | None:
        """Return the oldest upload not tried yet. If there is none, mark the thread as ended, so that later uploads
        start a new one."""
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
        if not self._is_current(upload):  # the last files sent may be of the newer save
            return
        receipt = _Receipt(save=upload.save, parts=list(upload.parts), files=sizes, time=time.time())
        self.store.write(f"{upload.tag}/{RECEIPT}{upload.rank}", json.dumps(asdict(receipt)).encode())
        self._publish(upload)
        self._note(upload).unlink(missing_ok=True)
        log_dist(f"the checkpoint {upload.tag} is in {self.store.url}", ranks=[upload.rank])
        self._remove_local(upload)

    def _is_current(self, upload: Upload) -> bool:
        """Return whether the local folder still holds that save; drop the upload if a newer save replaced it."""
        if _saved_as(self.local / check_tag(upload.tag)) == upload.save:
            return True
        self._note(upload).unlink(missing_ok=True)
        return False

    def _begin(self, upload: Upload) -> dict[str, int]:
        """Return the sizes of the files already uploaded. Files of an earlier save of the tag are removed first, as
        sizes do not distinguish them."""
        prefix = f"{upload.tag}/"
        there = {
            name[len(prefix) :]: size for name, size in self.store.sizes().items() if name.startswith(prefix)
        }
        progress, receipt = f"{_PROGRESS}{upload.save}.{upload.rank}", f"{RECEIPT}{upload.rank}"
        if progress in there:
            return there
        for name in (receipt, *upload.files):  # the receipt first: a partial removal is then incomplete
            if name in there:
                self.store.remove(prefix + name)
        self.store.write(prefix + progress, b"")
        return {}

    def _publish(self, upload: Upload) -> None:
        """Update `latest` and remove older tags, if this machine is the last to finish."""
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
        """Remove local copies of earlier saves; the last one stays for a quick restart."""
        waiting = {each.tag for each in self._pending()}
        saved_ns = _modified_ns(self.local / done.tag / _SAVE)
        for mark in list(self.local.rglob(_SAVE)):
            tag = mark.parent.relative_to(self.local).as_posix()
            if tag != done.tag and tag not in waiting and _modified_ns(mark) < saved_ns:
                shutil.rmtree(mark.parent, ignore_errors=True)

    # ---- Download

    def complete(self) -> dict[str, float]:
        """Return the complete tags with their time of completion [s since 1970]."""
        return self._complete(self.store.sizes())

    def _complete(self, sizes: Mapping[str, int]) -> dict[str, float]:
        tags = {name.rpartition("/")[0] for name in sizes if name.rpartition("/")[2].startswith(RECEIPT)}
        found = {tag: self._complete_save(tag, sizes) for tag in sorted(tags)}
        return {tag: save.time for tag, save in found.items() if save is not None}

    def _complete_save(self, tag: str, sizes: Mapping[str, int]) -> _CompleteSave | None:
        """Return the save of a tag for which all receipts and files exist; None if there is none."""
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
        """Return a receipt; None if it is gone or malformed: the bucket may hold other objects."""
        content = self.store.read(name)
        try:
            return _Receipt(**json.loads(content)) if content is not None else None
        except (ValueError, TypeError, AttributeError):
            logger.warning(f"{self.store.url}/{name} is not a checkpoint receipt: ignored")
            return None

    def has_checkpoint(self) -> bool:
        """Return whether the store has a checkpoint, or one is pending upload."""
        return LATEST in self.store.sizes() or any(self._pending())

    def fetch(self, tag: str | None = None) -> str | None:
        """Download the missing files of a complete tag into ``local`` and return the tag; None if no tag is given and
        `latest` does not exist.

        CheckpointNotFoundError: there is no such tag. CheckpointError: its upload is incomplete.
        """
        sizes = self.store.sizes()
        if tag is None and (tag := self._last(sizes)) is None:
            (self.local / LATEST).unlink(missing_ok=True)
            return None
        tag = check_tag(given_tag(tag), source=f"{self.store.url}: the tag")
        folder = self.local / tag
        if any(each.tag == tag for each in self._pending()):
            raise CheckpointError(
                f"{folder} is a newer save of {tag!r} than {self.store.url} has, but could not be uploaded: "
                "load it from that folder, or remove it"
            )
        save = self._complete_save(tag, sizes) or self._copied_by_hand(tag, sizes)
        for name in save.files:
            if name.startswith("/") or ".." in name.split("/") or "\\" in name:
                raise CheckpointError(
                    f"{self.store.url}/{tag}: {shown(name)} is not a file in a checkpoint folder"
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
        """Return the tag that `latest` names, or the newest complete one while that tag is being replaced."""
        content = self.store.read(LATEST) if LATEST in sizes else None
        if content is None:
            return None
        tag = content.decode(errors="replace").strip()
        replaced = any(name.startswith(f"{tag}/{_PROGRESS}") for name in sizes)
        if not replaced or self._complete_save(tag, sizes):
            return tag
        complete = self._complete(sizes)
        newest = max(complete, key=lambda each: complete[each], default=tag)
        logger.warning(f"{self.store.url}: the upload of {tag!r} is incomplete; loading {newest!r} instead")
        return newest

    def _copied_by_hand(self, tag: str, sizes: Mapping[str, int]) -> _CompleteSave:
        """Return all files below a tag without receipts or uploads in progress. Raises as `fetch` does."""
        below = {name[len(tag) + 1 :]: size for name, size in sizes.items() if name.startswith(f"{tag}/")}
        if below and not any(name.startswith((RECEIPT, _PROGRESS)) for name in below):
            return _CompleteSave(None, below, 0.0)
        known = ", ".join(self._complete(sizes)) or "none"
        if not below:
            raise CheckpointNotFoundError(
                f"{self.store.url} has no checkpoint {tag!r}; complete there: {known}"
            )
        raise CheckpointError(
            f"{self.store.url}/{tag}: its upload is incomplete; complete checkpoints there: {known}. The "
            "machine that saved it still has a copy, and resumes the upload when a run uses this URL"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Receipt:
    """Record of one rank's finished upload: its files with their sizes [bytes], and the time [s since 1970].
    ``parts``: the ranks that upload files of this save."""

    save: int
    parts: list[int]
    files: dict[str, int]
    time: float

    def __post_init__(self) -> None:
        """Check the types of the fields. TypeError: not written by an upload."""
        numbers = (self.save, self.time, *self.parts, *self.files.values())
        if not all(isinstance(number, (int, float)) for number in numbers):
            raise TypeError("expected numbers")


@dataclass(frozen=True, slots=True)
class _CompleteSave:
    """One complete save in the store: its id [None: unknown], its files' sizes [bytes], its time of completion [s
    since 1970]."""

    number: int | None
    files: Mapping[str, int]
    time: float


def local_copy(url: str, tag: str | None = None, staging: str | None = None) -> str:
    """Download ``tag`` [default: the latest] of a URL and return the local folder. Not collective."""
    mirror = Mirror(url, staging)
    mirror.finish_uploads()
    mirror.fetch(tag)
    return str(mirror.local)


def _default_staging() -> Path:
    """Return a folder private to this user. CheckpointError: it belongs to another user."""
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    folder = Path(tempfile.gettempdir()) / f"deepspeed-checkpoints-{user}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid != user:
        raise CheckpointError(f"{folder} belongs to another user: set checkpoint.staging_folder")
    return folder


def _modified_ns(path: Path) -> int:
    """Return when ``path`` was last modified [ns]; 0 if another process has removed it."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


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


def _finish_at_exit(mirror: Mirror) -> None:
    """Wait for uploads at exit. `atexit` handlers run too late: thread pools are shut down by then."""
    known = weakref.ref(mirror)

    def finish() -> None:
        if (left := known()) is not None:
            with suppress(CheckpointError):  # already logged
                left.wait()

    getattr(threading, "_register_atexit", atexit.register)(finish)
