"""Metrics of samples, and index files from metric values to samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspeed.data.data_sampling.indexed_dataset import MMapIndexedDataset
from deepspeed.data.data_sampling.utils import close_mmap_dataset_builder, create_mmap_dataset_builder

PERCENTILES = 100
_MAX_SORTED = 4 << 20
"""Number of samples sorted at a time."""

Chunks = Callable[[], Iterator[tuple[int, np.ndarray]]]
"""Returns a new iterator over the values of all samples in chunks, each with the index of its first sample."""

Counts = tuple[np.ndarray, np.ndarray]
"""Ascending values, and the number of samples with each."""


def joined(counts: Sequence[Counts]) -> Counts:
    """Return the sum of several ``Counts``."""
    if not counts:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    values, inverse = np.unique(np.concatenate([each[0] for each in counts]), return_inverse=True)
    numbers = np.zeros(len(values), np.int64)
    np.add.at(numbers, inverse, np.concatenate([each[1] for each in counts]))
    return values, numbers


def write_groups(
    samples_file: str,
    values_file: str,
    values: np.ndarray,
    counts: np.ndarray | None,
    chunks: Chunks,
    sample_dtype: Any,
    value_dtype: Any,
    numbers: np.ndarray | None = None,
) -> None:
    """Write the samples of each of the ascending ``values`` to ``samples_file``, and the values to ``values_file``.

    ``counts``: number of samples per value, to bound the samples sorted at once; None: sort all at once. ``numbers``:
    number of each sample; None: its index.
    """
    samples = create_mmap_dataset_builder(samples_file, sample_dtype)
    keys = create_mmap_dataset_builder(values_file, value_dtype)
    for first, last in _value_ranges(values, counts):
        places, found = _select(chunks(), int(values[first]), int(values[last - 1]))
        order = np.argsort(found, kind="stable")
        present, sizes = np.unique(found, return_counts=True)
        chosen = places[order]
        samples.add_flat(numbers[chosen] if numbers is not None else chosen, sizes)
        keys.add_flat(present, np.ones(len(present), np.int32))
    close_mmap_dataset_builder(samples, samples_file)
    close_mmap_dataset_builder(keys, values_file)


def _value_ranges(values: np.ndarray, counts: np.ndarray | None) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of ``values`` with at most ``_MAX_SORTED`` samples, or a single value."""
    if counts is None:
        counts = np.zeros(len(values), np.int64)
    ends = np.cumsum(counts)
    first = 0
    while first < len(values):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + _MAX_SORTED, side="right")))
        yield first, last
        first = last


def _select(
    chunks: Iterator[tuple[int, np.ndarray]], lowest: int, highest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return indices and values of the samples with values in [``lowest``, ``highest``]."""
    places, found = [np.empty(0, np.int64)], []
    for start, values in chunks:
        here = np.flatnonzero((values >= lowest) & (values <= highest))
        places.append(here + start)
        found.append(values[here])
    return np.concatenate(places), np.concatenate(found) if found else np.empty(0, np.int64)


def merged(fname: str, dtype: Any, parts: int) -> None:
    """Join the files ``fname``_thread0 and so on into ``fname``, and remove them."""
    builder = create_mmap_dataset_builder(fname, dtype)
    for part in range(parts):
        builder.merge_file_(f"{fname}_thread{part}")
    close_mmap_dataset_builder(builder, fname)
    for part in range(parts):
        for suffix in ("bin", "idx"):
            Path(f"{fname}_thread{part}.{suffix}").unlink()


def merge_entries(source: str, target: str, dtype: Any) -> None:
    """Merge every n // 100 consecutive of the n entries of ``source``, so that about 100 are left."""
    entries = MMapIndexedDataset(source, skip_warmup=True)
    ends = np.cumsum(entries.sizes, dtype=np.int64)
    together = max(1, len(ends) // PERCENTILES)
    builder = create_mmap_dataset_builder(target, dtype)
    start = 0
    for entry in range(0, len(ends), together):
        end = int(ends[min(entry + together, len(ends)) - 1])
        builder.add_flat(entries.flat[start:end], [end - start])
        start = end
    close_mmap_dataset_builder(builder, target)


# Arguments and results of metric functions.


SINGLE = "single_value_per_sample"
ACCUMULATED = "accumulate_value_over_samples"


def batches_of(
    dataset: Any, first: int, last: int, batch_size: int, collate: Callable[[list[Any]], Any]
) -> Iterator[tuple[int, Any]]:
    """Yield batches of samples [``first``, ``last``), each with the index of its first sample."""
    whole = getattr(dataset, "__getitems__", None)
    for start in range(first, last, batch_size):
        places = range(start, min(start + batch_size, last))
        samples = whole(list(places)) if whole is not None else [dataset[place] for place in places]
        yield start, collate(samples)


def numpy_dtype(dtype: Any, name: str) -> Any:
    """Return the numpy dtype of a torch (or numpy) dtype. TypeError: not an integer dtype."""
    found = torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)
    if found.kind not in "iu":
        raise TypeError(
            f"metric {name!r} has the dtype {dtype}: index files hold integers. Round it, or multiply it first"
        )
    return found.type


def checked_values(values: Any, dtype: Any, name: str) -> np.ndarray:
    """Return the result of a metric function as an array. TypeError: its dtype is not ``dtype`` (if given), or not
    integer."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    wanted = np.dtype(numpy_dtype(dtype if dtype is not None else array.dtype, name))
    if array.dtype != wanted:
        raise TypeError(f"metric {name!r} returned {array.dtype.name}, but its metric_dtype is {dtype}")
    return array
