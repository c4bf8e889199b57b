"""Read files of ``torch.save`` and ``archive_writer`` lazily, and verify the bytes that are read.

Files are memory-mapped, so only the pages accessed are read. Objects of unknown classes are never created.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
import zipfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.files.hashing import BLOCK, CHUNK_BYTES, count_blocks, hash_blocks, memory_at
from deepspeed.checkpoint.files.safe_types import allowed_types, trusts_files
from deepspeed.checkpoint.names import CHECKSUMS


def read_archive(path: Path) -> Any:
    """Return the content of a file; its tensors are memory-mapped and read on first access.

    CheckpointError names the file if it is missing, truncated, not an archive, or holds unknown classes. Only the
    structure is verified, by the archive's own checksum; to verify tensors, use ``open_archive``.
    """
    return open_archive(path).content


def open_archive(path: Path) -> Archive:
    """Return the file as an ``Archive``, which can also verify its tensors."""
    try:
        nbytes, note = _verify_structure(path)
        with allowed_types():
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=not trusts_files())
        return Archive(path, content, nbytes, note)
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path} does not exist") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(_unreadable(path, error)) from error
    except DAMAGE as error:
        raise CheckpointError(_damaged(path, error)) from error


def open_states(path: Path, what: str = "the states of a checkpoint") -> Archive:
    """Return the file as an ``Archive`` whose content is a dict. CheckpointError: it is not ``what``."""
    archive = open_archive(path)
    if not isinstance(archive.content, dict):
        raise CheckpointError(f"{path} holds a {type(archive.content).__name__}, not {what}")
    return archive


DAMAGE = (
    RuntimeError, OSError, EOFError, ValueError, LookupError, AttributeError, TypeError, MemoryError,
    zipfile.BadZipFile, struct.error,
)  # fmt: skip
"""Exceptions that reading a damaged file may raise."""


NOTE = "/note.json"
"""Name of the record that holds the note of ``write_archive``, in the folder of torch's records."""


def _verify_structure(path: Path) -> tuple[int, Mapping[str, Any] | None]:
    """Verify the pickle's checksum; return its size in bytes, and the file's note (None if there is none)."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise CheckpointError(
                    f"{path} is rejected: its member {info.filename:.100} is compressed, unlike in any "
                    f"checkpoint ({info.compress_size} bytes would become {info.file_size} in memory)"
                )
        names = archive.namelist()
        notes = [json.loads(archive.read(name)) for name in names if name.endswith(NOTE)]
        nbytes = sum(len(archive.read(name)) for name in names if name.endswith("/data.pkl"))
        return nbytes, next(iter(notes), None)


class Archive:
    """An open file: ``content``, whose tensors are memory-mapped, and the hashes to verify them as they are read.

    ``note``: the note of ``write_archive``. ``bytes_read`` counts the structure and the verified blocks. A file
    without hashes (from another writer, or in format 1) is not verified.
    """

    def __init__(
        self, path: Path, content: Any, structure_bytes: int, note: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self.content = content
        self.note = note
        self.bytes_read = structure_bytes
        table = content.pop(CHECKSUMS, None) if isinstance(content, dict) else None
        self._hashes = table.numpy().view(np.uint32) if isinstance(table, Tensor) and table.numel() else None
        self._table = table
        self._records: list[tuple[int, int, int]] = []
        self._origin = 0
        self._verified = np.zeros(0 if self._hashes is None else self._hashes.size, dtype=bool)

    def verify(self, tensor: Tensor) -> int:
        """Verify the blocks that ``tensor``, a view of this file, touches; return the bytes read for the first time.
        CheckpointError: a checksum mismatch."""
        if self._hashes is None or not tensor.numel():
            return tensor.numel() * tensor.element_size()
        self._locate()
        begin = tensor.data_ptr() - self._origin
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        number = bisect_right(self._records, begin, key=lambda record: record[0]) - 1
        offset, nbytes, _ = self._records[number]
        assert offset <= begin < offset + nbytes, "a tensor from another file"
        first = (begin - offset) // BLOCK
        last = (begin + (steps + 1) * tensor.element_size() - offset - 1) // BLOCK
        return self._verify_blocks(number, first, last + 1)

    def verify_rest(self, later: Iterable[Tensor]) -> None:
        """Verify every tensor except those that ``verify`` will be called for ``later``."""
        if self._hashes is None:
            return
        self._locate()
        starts = [record[0] for record in self._records]
        left = {bisect_right(starts, t.data_ptr() - self._origin) - 1 for t in later if t.numel()}
        for number, (_, nbytes, _) in enumerate(self._records):
            if number not in left:
                self._verify_blocks(number, 0, count_blocks(nbytes))

    def _verify_blocks(self, number: int, first: int, stop: int) -> int:
        assert self._hashes is not None
        offset, nbytes, first_hash = self._records[number]
        read = 0
        for start in range(first, stop, CHUNK_BYTES // BLOCK):
            end = min(start + CHUNK_BYTES // BLOCK, stop)
            known = self._verified[first_hash + start : first_hash + end]
            if known.all():
                continue
            low, high = start * BLOCK, min(end * BLOCK, nbytes)
            data = memory_at(self._origin + offset + low, high - low)
            if not np.array_equal(hash_blocks(data), self._hashes[first_hash + start : first_hash + end]):
                raise CheckpointError(
                    f"{self.path} is damaged: its bytes {offset + low} to {offset + high} do not match their checksum"
                )
            read += min(BLOCK * int((~known).sum()), high - low)
            known[:] = True
        self.bytes_read += read
        return read

    def _locate(self) -> None:
        """Find the offsets of the records in the file and in memory; the hash table is the last record."""
        if self._records:
            return
        assert self._table is not None
        try:
            found = tensor_records(self.path)
        except DAMAGE as error:
            raise CheckpointError(_damaged(self.path, error)) from error
        *rest, (table_offset, _) = (found[number] for number in sorted(found))
        self._origin = self._table.data_ptr() - table_offset
        hashes = 0
        for offset, nbytes in rest:
            if nbytes:
                self._records.append((offset, nbytes, hashes))
            hashes += count_blocks(nbytes)
        if hashes != self._verified.size:
            raise CheckpointError(
                f"{self.path} is damaged: it has {self._verified.size} checksums for {hashes} blocks"
            )


def deserialize(content: bytes) -> Any:
    with allowed_types():
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=not trusts_files())


_LOCAL_HEADER = struct.Struct("<26xHH")  # ends with the lengths of the name and of the extra field


def tensor_records(path: Path) -> dict[int, tuple[int, int]]:
    """Return number -> (offset, size in bytes) of each storage in the file."""
    found: dict[int, tuple[int, int]] = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            folder, _, number = info.filename.rpartition("/")
            if folder.endswith("/data") and number.isdigit():
                file.seek(info.header_offset)
                lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                found[int(number)] = (file.tell() + sum(lengths), info.file_size)
    return found


def _unreadable(path: Path, error: Exception) -> str:
    text = str(error)
    found = re.search(r"GLOBAL (\S+)", text) or re.search(r"add_safe_globals\(\[(\S+?)\]\)", text)
    if found:
        return (
            f"{path} holds an object of class {found[1]}, which is not loaded by default. If you trust the "
            "file, allow the class with torch.serialization.add_safe_globals([...]) before loading, or all "
            "classes with the environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1."
        )
    detail = text.partition("WeightsUnpickler error:")[2].strip()
    return _damaged(path, pickle.UnpicklingError(detail) if detail else error)


def _damaged(path: Path, error: Exception) -> str:
    size = path.stat().st_size if path.exists() else 0
    if isinstance(error, zipfile.BadZipFile) and "CRC" not in str(error):
        return f"{path} ({size} bytes) is truncated or not a checkpoint file"
    detail = (str(error) or type(error).__name__).splitlines()[0][:200]
    return f"{path} ({size} bytes) is damaged: {detail}"
