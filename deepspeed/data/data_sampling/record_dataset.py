"""The older format of indexed files (fairseq's): arrays of any shape, read by position from the file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from deepspeed.data.data_sampling.index_format import (
    CODES,
    data_file_path,
    index_file_path,
    read_longs,
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


class IndexedCachedDataset(IndexedDataset):
    """Keeps in memory what :meth:`prefetch` names."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._kept: dict[int, np.ndarray] = {}

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
