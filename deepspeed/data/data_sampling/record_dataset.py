"""The older format of indexed files (fairseq's): arrays of any shape, read by position from the file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from deepspeed.data.data_sampling.index_format import (
    CODES,
    code,
    data_file_path,
    index_file_path,
    read_longs,
    write_longs,
)


class IndexedDataset(Dataset[Any]):
    """Entries of ``path``.bin as numpy arrays, each read when it is asked for; a slice gives a list of them.

    Raises:
        ValueError: the index has another format.
    """

    _HDR_MAGIC = b"TNTIDX\x00\x00"

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = str(path)
        self.data_file: Any = None
        self.read_index(self.path)

    def read_index(self, path: str) -> None:
        with open(index_file_path(path), "rb") as stream:
            if stream.read(8) != self._HDR_MAGIC:
                raise ValueError(f"{index_file_path(path)} is no index of this format")
            (version,) = struct.unpack("<Q", stream.read(8))
            if version != 1:
                raise ValueError(f"{index_file_path(path)} has version {version}; version 1 is known")
            number, self.element_size = struct.unpack("<QQ", stream.read(16))
            self.dtype = CODES[number]
            self._len, self.s, self.doc_count = struct.unpack("<QQQ", stream.read(24))
            self.dim_offsets = read_longs(stream, self._len + 1)
            self.data_offsets = read_longs(stream, self._len + 1)
            self.sizes = read_longs(stream, self.s)
            self.doc_idx = read_longs(stream, self.doc_count)

    def read_data(self, path: str) -> None:
        self.data_file = open(data_file_path(path), "rb", buffering=0)  # noqa: SIM115 - until the end

    def check_index(self, i: int) -> None:
        if not 0 <= i < self._len:
            raise IndexError(f"entry {i} of {self._len}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "data_file": None}

    def __del__(self) -> None:
        if self.__dict__.get("data_file") is not None:
            self.data_file.close()

    def __getitem__(self, idx: int | slice) -> Any:
        if isinstance(idx, slice):
            first, stop, step = idx.indices(len(self))
            if step != 1:
                raise ValueError("slices of an indexed data set are contiguous: leave out the step")
            return [self._read(i) for i in range(first, stop)]
        self.check_index(idx)
        return self._read(idx)

    def _read(self, i: int) -> np.ndarray:
        if self.data_file is None:
            self.read_data(self.path)
        assert self.data_file is not None
        shape = self.sizes[self.dim_offsets[i] : self.dim_offsets[i + 1]]
        self.data_file.seek(int(self.data_offsets[i]) * self.element_size)
        count = int(self.data_offsets[i + 1] - self.data_offsets[i])
        data = np.frombuffer(self.data_file.read(count * self.element_size), self.dtype)
        return data.reshape(shape).copy()

    def __len__(self) -> int:
        return self._len

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    @staticmethod
    def exists(path: str | Path) -> bool:
        return Path(index_file_path(path)).exists() and Path(data_file_path(path)).exists()

    @property
    def supports_prefetch(self) -> bool:
        return False  # the operating system reads ahead


class IndexedCachedDataset(IndexedDataset):
    """Keeps in memory what :meth:`prefetch` names."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._kept: dict[int, np.ndarray] = {}

    @property
    def supports_prefetch(self) -> bool:
        return True

    def prefetch(self, indices: Any) -> None:
        """Keep these entries, and no others."""
        wanted = sorted({int(i) for i in indices})
        self._kept = {
            i: self._kept[i] if i in self._kept else super(IndexedCachedDataset, self)._read(i)
            for i in wanted
        }

    def _read(self, i: int) -> np.ndarray:
        kept = self._kept.get(i)
        return super()._read(i) if kept is None else kept.copy()


class IndexedDatasetBuilder:
    """Writes the pair of files: ``out_file`` is the name of the data file. ``dtype``: an integer dtype.

    Raises:
        ValueError: files do not hold this dtype.
    """

    def __init__(self, out_file: str | Path, dtype: Any = np.int32) -> None:
        code(dtype)
        self.out_file = open(out_file, "wb")  # noqa: SIM115 - until finalize()
        self.dtype = dtype
        self.element_size = np.dtype(dtype).itemsize
        self.data_offsets, self.dim_offsets, self.doc_idx = [0], [0], [0]
        self.sizes: list[int] = []

    def add_item(self, tensor: torch.Tensor | np.ndarray) -> None:
        """One entry of any shape."""
        values = np.asarray(tensor.numpy() if isinstance(tensor, torch.Tensor) else tensor)
        self.out_file.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())
        self.data_offsets.append(self.data_offsets[-1] + values.size)
        self.sizes.extend(values.shape)
        self.dim_offsets.append(self.dim_offsets[-1] + values.ndim)

    def end_document(self) -> None:
        self.doc_idx.append(len(self.sizes))

    def merge_file_(self, another_file: str | Path) -> None:
        """Add the entries and documents of other files. ValueError: their dtype differs."""
        other = IndexedDataset(another_file)
        if np.dtype(other.dtype) != np.dtype(self.dtype):
            raise ValueError(
                f"{another_file} holds {np.dtype(other.dtype).name}, not {np.dtype(self.dtype).name}"
            )
        first = len(self.sizes)
        self.data_offsets.extend((self.data_offsets[-1] + other.data_offsets[1:]).tolist())
        self.dim_offsets.extend((self.dim_offsets[-1] + other.dim_offsets[1:]).tolist())
        self.sizes.extend(other.sizes.tolist())
        self.doc_idx.extend((first + other.doc_idx[1:]).tolist())
        with open(data_file_path(another_file), "rb") as stream:
            while part := stream.read(1 << 20):
                self.out_file.write(part)

    def finalize(self, index_file: str | Path) -> None:
        """Close the data file and write the index."""
        self.out_file.close()
        with open(index_file, "wb") as stream:
            stream.write(IndexedDataset._HDR_MAGIC)
            stream.write(struct.pack("<QQQ", 1, code(self.dtype), self.element_size))
            stream.write(struct.pack("<QQQ", len(self.data_offsets) - 1, len(self.sizes), len(self.doc_idx)))
            for numbers in (self.dim_offsets, self.data_offsets, self.sizes, self.doc_idx):
                write_longs(stream, numbers)
