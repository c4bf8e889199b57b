"""Helpers of the data analysis: index dtypes, partitions of a data set, index files."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np

from deepspeed.data.data_sampling.indexed_dataset import (
    MMapIndexedDatasetBuilder,
    data_file_path,
    index_file_path,
)


def find_fit_int_dtype(min_value: int, max_value: int) -> Any:
    """Return the smallest integer dtype that holds both; unsigned unless ``min_value`` is negative."""
    kinds = (np.uint8, np.uint16, np.uint32, np.uint64)
    if min_value < 0:
        kinds = (np.int8, np.int16, np.int32, np.int64)
    for kind in kinds:
        limits = np.iinfo(kind)
        if limits.min <= min_value and max_value <= limits.max:
            return kind
    raise ValueError(f"no 64-bit integer type holds both {min_value} and {max_value}")


def split_index(start_idx: int, end_idx: int, num_partitions: int) -> list[tuple[int, int]]:
    """Return the intervals [start, end) of ``num_partitions`` parts of about equal length."""
    bounds = np.linspace(start_idx, end_idx, num_partitions + 1, dtype=int).tolist()
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def split_dataset(
    dataset: Sized, num_workers: int, worker_id: int, num_threads: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the intervals of all workers, and those of the threads of worker ``worker_id``."""
    workers = split_index(0, len(dataset), num_workers)
    return workers, split_index(*workers[worker_id], num_threads)


def create_mmap_dataset_builder(fname: str, dtype: Any) -> MMapIndexedDatasetBuilder:
    """Return a builder of the files ``fname``.bin and ``fname``.idx."""
    return MMapIndexedDatasetBuilder(data_file_path(fname), dtype=dtype)


def close_mmap_dataset_builder(builder: MMapIndexedDatasetBuilder, fname: str) -> None:
    builder.end_document()
    builder.finalize(index_file_path(fname))
