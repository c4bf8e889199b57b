"""Writes the older format of indexed data sets, which is only read by the package."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspeed.data.data_sampling.indexed_dataset import IndexedDataset, code


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

    def finalize(self, index_file: str | Path) -> None:
        """Close the data file and write the index."""
        self.out_file.close()
        with open(index_file, "wb") as stream:
            stream.write(IndexedDataset._HDR_MAGIC)
            stream.write(struct.pack("<QQQ", 1, code(self.dtype), self.element_size))
            stream.write(struct.pack("<QQQ", len(self.data_offsets) - 1, len(self.sizes), len(self.doc_idx)))
            for numbers in (self.dim_offsets, self.data_offsets, self.sizes, self.doc_idx):
                stream.write(np.asarray(list(numbers), dtype=np.int64).tobytes())
