"""Arrays of varying length in a pair of files, `NAME.bin` and `NAME.idx`, memory-mapped or read on demand.

`MMapIndexedDataset` reads the format of Megatron-LM and of the curriculum's index files: the data end to end, and an
index with a header, the length of each entry (int32), its position in bytes (int64), and the document starts (int64).
`IndexedDataset` and its subclasses read the older format of fairseq.
"""

from __future__ import annotations

import struct
from array import array
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from deepspeed.base.logging import logger

__all__ = [
    "Index", "IndexedCachedDataset", "IndexedDataset", "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder", "code", "data_file_path", "get_available_dataset_impl",
    "index_file_path", "infer_dataset_impl", "make_builder", "make_dataset", "read_longs",
]  # fmt: skip

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")  # version, dtype, entries, documents
_CHUNK = 1 << 20


class Index:
    """The contents of an index file, mapped into memory.

    Raises:
        ValueError: it is not an index in this format.
    """

    def __init__(self, path: str | Path, skip_warmup: bool = False) -> None:
        with open(path, "rb") as stream:
            if stream.read(len(_MAGIC)) != _MAGIC:
                raise ValueError(f"{path} is not an index of a memory-mapped data set")
            version, self._code, entries, documents = _HEADER.unpack(stream.read(_HEADER.size))
            if version != 1:
                raise ValueError(f"{path} has format version {version}; only version 1 is supported")
            start = stream.tell()
        self.dtype = CODES[self._code]
        buffer = np.memmap(path, mode="r")
        if not skip_warmup:
            buffer[::4096].max(initial=0)  # touches every page
        self._buffer = buffer
        self.sizes = np.frombuffer(buffer, np.int32, entries, start)
        start += self.sizes.nbytes
        self._pointers = np.frombuffer(buffer, np.int64, entries, start)
        self.doc_idx = np.frombuffer(buffer, np.int64, documents, start + self._pointers.nbytes)

    def take_size(self, nbytes: int) -> None:
        """Interpret an ambiguous dtype code as Megatron-LM does, if only that matches a data file of ``nbytes``."""
        if self._code not in MEGATRON_CODES:
            return
        ours, theirs = CODES[self._code], MEGATRON_CODES[self._code]
        elements = int(self.sizes.sum(dtype=np.int64))
        if elements * np.dtype(theirs).itemsize == nbytes != elements * np.dtype(ours).itemsize:
            self.dtype = theirs

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> tuple[int, int]:
        """Return (position in bytes, number of elements) of entry ``i``."""
        return int(self._pointers[i]), int(self.sizes[i])


class _Entries(Dataset[Any]):
    """Entries of a pair of files, by number."""

    sizes: Any
    supports_prefetch = False

    def get(self, idx: int) -> np.ndarray:
        """Return an entry. IndexError: out of range."""
        raise NotImplementedError

    def __getitem__(self, idx: int | slice) -> Any:
        """Return an entry, or a list of them. IndexError: out of range. ValueError: a slice with a step."""
        if isinstance(idx, slice):
            first, stop, step = idx.indices(len(self))  # type: ignore[arg-type]
            if step != 1:
                raise ValueError("slices of an indexed data set must be contiguous: leave out the step")
            return [self.get(i) for i in range(first, stop)]
        return self.get(idx)

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    @staticmethod
    def exists(path: str | Path) -> bool:
        return Path(index_file_path(path)).exists() and Path(data_file_path(path)).exists()


class MMapIndexedDataset(_Entries):
    """Entries of ``path``.bin as numpy arrays; a slice returns a list of them.

    Pickled by its path, so that worker processes map the files themselves.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: the index has another format.
    """

    Index = Index

    def __init__(self, path: str | Path, skip_warmup: bool = False) -> None:
        super().__init__()
        self._open(str(path), skip_warmup)

    def _open(self, path: str, skip_warmup: bool) -> None:
        self._path = path
        self._index = Index(index_file_path(path), skip_warmup)
        data = Path(data_file_path(path))
        size = data.stat().st_size
        self._index.take_size(size)
        self._bin = np.memmap(data, mode="r") if size else np.empty(0, np.uint8)

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, state: str) -> None:
        self._open(state, skip_warmup=True)

    def __len__(self) -> int:
        return len(self._index)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return ``length`` elements of entry ``idx`` from ``offset`` on (None: to its end), as a view of the file."""
        if not -len(self) <= idx < len(self):
            raise IndexError(f"index {idx} is out of range for {len(self)} entries")
        start, size = self._index[int(idx)]
        dtype = np.dtype(self._index.dtype)
        count = size - offset if length is None else length
        if count <= 0:
            return np.empty(0, dtype)
        return np.frombuffer(self._bin, dtype, count, start + offset * dtype.itemsize)

    @property
    def flat(self) -> np.ndarray:
        """Return all elements end to end, memory-mapped."""
        return self._bin.view(self._index.dtype)

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of elements of each entry, int32."""
        return self._index.sizes

    @property
    def doc_idx(self) -> np.ndarray:
        """Return the first entry of each document, and the number of entries."""
        return self._index.doc_idx

    @property
    def dtype(self) -> Any:
        return self._index.dtype


class MMapIndexedDatasetBuilder:
    """Writes the pair of files: ``out_file`` is the name of the data file.

    Args:
        dtype: an integer dtype of at most 64 bits, to which added arrays are converted.

    Raises:
        ValueError: the format does not support this dtype.
    """

    def __init__(self, out_file: str | Path, dtype: Any = np.int64) -> None:
        code(dtype)
        self._data_file = open(out_file, "wb")  # noqa: SIM115 - until finalize()
        self._dtype = dtype
        self._sizes = array("i")
        self._doc_idx = array("q", [0])

    def add_item(self, tensor: torch.Tensor | np.ndarray) -> None:
        """Add one entry [n]."""
        values = tensor.numpy() if isinstance(tensor, torch.Tensor) else tensor
        self.add_item_numpy(np.asarray(values))

    def add_item_numpy(self, np_array: np.ndarray) -> None:
        self._data_file.write(np.ascontiguousarray(np_array, dtype=self._dtype).tobytes())
        self._sizes.append(np_array.size)

    def add_flat(self, values: np.ndarray, sizes: Any) -> None:
        """Add entries that lie end to end in ``values``; ``sizes``: elements of each."""
        self._data_file.write(np.ascontiguousarray(values, dtype=self._dtype).tobytes())
        self._sizes.frombytes(np.asarray(sizes, dtype=np.int32).tobytes())

    def end_document(self) -> None:
        self._doc_idx.append(len(self._sizes))

    def merge_file_(self, another_file: str | Path) -> None:
        """Add the entries and documents of the files ``another_file``.bin and .idx. ValueError: their dtype differs."""
        other = MMapIndexedDataset(another_file, skip_warmup=True)
        if np.dtype(other.dtype) != np.dtype(self._dtype):
            raise ValueError(
                f"{another_file} holds {np.dtype(other.dtype).name}, but this file holds {np.dtype(self._dtype).name}"
            )
        first, data = len(self._sizes), other.flat
        for start in range(0, len(data), _CHUNK):
            self._data_file.write(data[start : start + _CHUNK].tobytes())
        self._sizes.frombytes(other.sizes.tobytes())
        self._doc_idx.extend((first + other.doc_idx[1:]).tolist())

    def finalize(self, index_file: str | Path) -> None:
        """Close the data file and write the index."""
        self._data_file.close()
        sizes, dtype = np.frombuffer(self._sizes, np.int32), np.dtype(self._dtype)
        with open(index_file, "wb") as file:
            file.write(_MAGIC + _HEADER.pack(1, code(dtype), len(sizes), len(self._doc_idx)))
            file.write(sizes.tobytes())
            start = 0
            for first in range(0, len(sizes), _CHUNK):  # in chunks: there may be a billion positions
                ends = np.cumsum(sizes[first : first + _CHUNK], dtype=np.int64) * dtype.itemsize + start
                file.write(np.concatenate(([start], ends[:-1])).astype(np.int64).tobytes())
                start = int(ends[-1])
            file.write(self._doc_idx)


def make_builder(out_file: str | Path, impl: str, vocab_size: int | None = None) -> MMapIndexedDatasetBuilder:
    """Make a builder for token ids: uint16 where a vocabulary of ``vocab_size`` fits (below 65,500), else int32.
    ValueError: ``impl`` is not 'mmap', the only format written here."""
    if impl != "mmap":
        raise ValueError(f"impl={impl!r}: only 'mmap' is written, which make_dataset(path, 'infer') opens")
    small = vocab_size is not None and vocab_size < 65_500
    return MMapIndexedDatasetBuilder(out_file, np.uint16 if small else np.int32)


# Detection of the format ------------------------------------------------------------------------------------


def get_available_dataset_impl() -> list[str]:
    return ["lazy", "cached", "mmap"]


def _exists_or_warn(path: str | Path) -> bool:
    found = IndexedDataset.exists(path)
    if not found:
        logger.warning(f"no data set at {path}: {index_file_path(path)} or {data_file_path(path)} is missing")
    return found


def infer_dataset_impl(path: str | Path) -> str | None:
    """Return 'mmap' or 'cached', by the first bytes of the index; None: there is no index, or its format is unknown."""
    if not _exists_or_warn(path):
        return None
    with open(index_file_path(path), "rb") as stream:
        magic = stream.read(8)
    return {IndexedDataset._HDR_MAGIC[:8]: "cached", _MAGIC[:8]: "mmap"}.get(magic)


def make_dataset(path: str | Path, impl: str, skip_warmup: bool = False) -> Any:
    """Open the data set in format ``impl`` ('lazy', 'cached', 'mmap', or 'infer'); None, with a warning: not found."""
    if not _exists_or_warn(path):
        return None
    if impl == "infer":
        impl = infer_dataset_impl(path) or ""
    if impl == "mmap":
        return MMapIndexedDataset(path, skip_warmup)
    if impl in ("lazy", "cached"):
        return (IndexedDataset if impl == "lazy" else IndexedCachedDataset)(path)
    logger.warning(f"the format {impl!r} of {path} is not one of {', '.join(get_available_dataset_impl())}")
    return None


# The older format of indexed files (fairseq's): arrays of any shape, read from the file by position.


class IndexedDataset(_Entries):
    """Entries of ``path``.bin as numpy arrays, each read on access; a slice returns a list of them.

    Raises:
        ValueError: the index has another format.
    """

    _HDR_MAGIC = b"TNTIDX\x00\x00"

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = str(path)
        self.data_file: Any = None
        with open(index_file_path(path), "rb") as stream:
            if stream.read(8) != self._HDR_MAGIC:
                raise ValueError(f"{index_file_path(path)} is not an index of this format")
            (version,) = struct.unpack("<Q", stream.read(8))
            if version != 1:
                raise ValueError(
                    f"{index_file_path(path)} has version {version}; only version 1 is supported"
                )
            number, self.element_size = struct.unpack("<QQ", stream.read(16))
            self.dtype = CODES[number]
            self._len, self.s, self.doc_count = struct.unpack("<QQQ", stream.read(24))
            self.dim_offsets = read_longs(stream, self._len + 1)
            self.data_offsets = read_longs(stream, self._len + 1)
            self.sizes = read_longs(stream, self.s)
            self.doc_idx = read_longs(stream, self.doc_count)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "data_file": None}

    def __del__(self) -> None:
        if self.__dict__.get("data_file") is not None:
            self.data_file.close()

    def get(self, idx: int) -> np.ndarray:
        if not 0 <= idx < self._len:
            raise IndexError(f"index {idx} is out of range for {self._len} entries")
        return self._read(idx)

    def _read(self, i: int) -> np.ndarray:
        if self.data_file is None:
            self.data_file = open(data_file_path(self.path), "rb", buffering=0)  # noqa: SIM115 - until the end
        shape = self.sizes[self.dim_offsets[i] : self.dim_offsets[i + 1]]
        self.data_file.seek(int(self.data_offsets[i]) * self.element_size)
        count = int(self.data_offsets[i + 1] - self.data_offsets[i])
        data = np.frombuffer(self.data_file.read(count * self.element_size), self.dtype)
        return data.reshape(shape).copy()

    def __len__(self) -> int:
        return self._len


class IndexedCachedDataset(IndexedDataset):
    """Keeps the entries passed to :meth:`prefetch` in memory."""

    supports_prefetch = True

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._kept: dict[int, np.ndarray] = {}

    def prefetch(self, indices: Any) -> None:
        """Keep these entries in memory, and drop all others."""
        wanted = sorted({int(i) for i in indices})
        self._kept = {
            i: self._kept[i] if i in self._kept else super(IndexedCachedDataset, self)._read(i)
            for i in wanted
        }

    def _read(self, i: int) -> np.ndarray:
        kept = self._kept.get(i)
        return super()._read(i) if kept is None else kept.copy()


# Shared by both formats: file names, dtype codes, documents.

CODES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.uint16,
    7: np.uint32,
    8: np.uint64,
}
MEGATRON_CODES: dict[int, Any] = {6: np.float64, 7: np.float32, 8: np.uint16}
"""Dtype codes that differ between Megatron-LM and release 0.19."""


def code(dtype: Any) -> int:
    """Return the code of a dtype in the header of an index. ValueError: the format does not support this dtype."""
    wanted = np.dtype(dtype)
    for number, known in CODES.items():
        if np.dtype(known) == wanted:
            return number
    known = ", ".join(np.dtype(each).name for each in CODES.values())
    raise ValueError(f"indexed files hold {known}, not {wanted.name}")


def index_file_path(prefix_path: str | Path) -> str:
    return f"{prefix_path}.idx"


def data_file_path(prefix_path: str | Path) -> str:
    return f"{prefix_path}.bin"


def read_longs(f: IO[bytes], n: int) -> np.ndarray:
    """Read ``n`` 64-bit integers."""
    return np.frombuffer(f.read(8 * n), dtype=np.int64).copy()
