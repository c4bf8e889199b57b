"""Objects below one URL, through fsspec. Failures are retried, as networks and services fail transiently."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from deepspeed.base.logging import logger
from deepspeed.checkpoint.errors import CheckpointError

ATTEMPTS = 6
FIRST_WAIT_S = 0.5
_EXTRA = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_FINAL = (FileNotFoundError, PermissionError, NotImplementedError, TypeError, ValueError)
"""Errors that are not retried."""

T = TypeVar("T")


class Store:
    """The objects below ``url``, named relative to it."""

    def __init__(self, url: str, *, attempts: int = ATTEMPTS, first_wait_s: float = FIRST_WAIT_S) -> None:
        """CheckpointError: no file system for the URL's scheme is installed, or it has no scheme."""
        self.url = url.rstrip("/")
        self.attempts, self.first_wait_s = attempts, first_wait_s
        try:
            from fsspec.core import url_to_fs  # a dependency of torch

            self._files, root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            scheme = url.partition("://")[0]
            package = _EXTRA.get(scheme)
            remedy = f"pip install {package}" if package else "use file, memory, s3, gs or any fsspec scheme"
            raise CheckpointError(f"{url}: no file system for {scheme!r} ({error}); {remedy}") from error
        self._root = str(root).rstrip("/")

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each object, by name."""

        def find() -> dict[str, int]:
            self._files.invalidate_cache()
            found: dict[str, Any] = self._files.find(self._root, detail=True)
            return {path[len(self._root) :].lstrip("/"): int(entry["size"]) for path, entry in found.items()}

        try:
            return self._retried("listing it", find)
        except FileNotFoundError:
            return {}

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None if there is none of that name."""
        try:
            return self._retried(f"reading {name}", lambda: self._files.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        self._retried(
            f"writing {name}", lambda: self._put(name, lambda path: self._files.pipe_file(path, content))
        )

    def upload(self, source: Path, name: str) -> None:
        """Upload a file; a large one in several parts, if the service supports it."""
        self._retried(
            f"uploading {name}", lambda: self._put(name, lambda path: self._files.put_file(str(source), path))
        )

    def download(self, name: str, target: Path) -> None:
        """Download an object to a file, which gets its name once complete. FileNotFoundError: there is no such
        object."""
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        self._retried(f"downloading {name}", lambda: self._files.get_file(self._path(name), str(part)))
        part.replace(target)

    def remove(self, name: str) -> None:
        try:
            self._retried(f"removing {name}", lambda: self._files.rm_file(self._path(name)))
        except FileNotFoundError:
            return

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder, if the service has folders."""
        with suppress(Exception):  # not empty, or no folders: errors differ by service
            self._files.rmdir(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put(self, name: str, put: Callable[[str], Any]) -> None:
        path = self._path(name)
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)  # a no-op for buckets
        put(path)

    def _retried(self, what: str, call: Callable[[], T]) -> T:
        """Return the result of ``call``, tried up to ``attempts`` times. CheckpointError: all attempts failed."""
        for attempt in range(1, self.attempts + 1):
            try:
                return call()
            except _FINAL:
                raise
            except Exception as error:  # exceptions vary by service
                if attempt == self.attempts:
                    raise CheckpointError(f"{self.url}: {what} failed {attempt} times: {error}") from error
                logger.warning(f"{self.url}: {what} failed ({type(error).__name__}: {error}); retrying")
                time.sleep(self.first_wait_s * 2 ** (attempt - 1))
        raise AssertionError("attempts must be at least 1")
