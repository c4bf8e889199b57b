"""Indexed files: what is written is read, and the bytes are those of the documented format."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.data.data_sampling import indexed_dataset as module
from deepspeed.data.data_sampling.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    make_dataset,
)
from deepspeed.data.data_sampling.utils import (
    close_mmap_dataset_builder,
    create_mmap_dataset_builder,
    find_fit_int_dtype,
    split_dataset,
    split_index,
)
from tests.data.older_format import IndexedDatasetBuilder

DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16, np.uint32, np.uint64]


def write(prefix: Path, dtype: Any = np.int32) -> Path:
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    builder.add_item(torch.tensor([1, 2, 3]))
    builder.add_item_numpy(np.array([4]))
    builder.end_document()
    for entry in ([5, 6], [], [7]):
        builder.add_item_numpy(np.array(entry, dtype=np.int64))
    builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


ENTRIES = [[1, 2, 3], [4], [5, 6], [], [7]]


@pytest.mark.parametrize("number", range(1, 9))
def test_the_bytes_of_the_format(tmp_path: Path, number: int) -> None:
    dtype = DTYPES[number - 1]
    write(tmp_path / "x", dtype)
    size = np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, number, 5, 3)
    index += np.array([3, 1, 2, 0, 1], np.int32).tobytes()
    index += (size * np.array([0, 3, 4, 6, 6], np.int64)).tobytes() + np.array([0, 2, 5], np.int64).tobytes()
    assert (tmp_path / "x.idx").read_bytes() == index
    assert (tmp_path / "x.bin").read_bytes() == np.arange(1, 8, dtype=dtype).tobytes()
    read = MMapIndexedDataset(tmp_path / "x")
    assert read.dtype is dtype and [entry.tolist() for entry in read] == ENTRIES


def test_reading(tmp_path: Path) -> None:
    data = make_dataset(write(tmp_path / "x"), "infer", skip_warmup=True)
    assert isinstance(data, MMapIndexedDataset) and len(data) == 5
    assert [entry.tolist() for entry in data[1:3]] == [[4], [5, 6]] and data[-1].tolist() == [7]
    assert data.get(0, 1).tolist() == [2, 3] and data.get(0, offset=1, length=1).tolist() == [2]
    assert data.sizes.tolist() == [3, 1, 2, 0, 1] and data.size(2) == 2
    assert data.doc_idx.tolist() == [0, 2, 5]
    assert MMapIndexedDataset.exists(tmp_path / "x")
    again = pickle.loads(pickle.dumps(data))
    assert again[0].tolist() == [1, 2, 3]
    with pytest.raises(IndexError):
        data[5]
    with pytest.raises(ValueError, match="step"):
        data[::2]


def test_merging(tmp_path: Path) -> None:
    builder = MMapIndexedDatasetBuilder(tmp_path / "y.bin", dtype=np.int32)
    builder.add_item(torch.tensor([9]))
    builder.end_document()
    builder.merge_file_(write(tmp_path / "x"))
    builder.finalize(tmp_path / "y.idx")
    data = MMapIndexedDataset(tmp_path / "y")
    assert [entry.tolist() for entry in data] == [[9], *ENTRIES]
    assert data.doc_idx.tolist() == [0, 1, 3, 6]
    small = MMapIndexedDatasetBuilder(tmp_path / "z.bin", dtype=np.uint16)
    with pytest.raises(ValueError, match="holds int32, but this file holds uint16"):
        small.merge_file_(tmp_path / "x")


def test_what_megatron_means_by_a_code_is_seen_from_the_length(tmp_path: Path) -> None:
    """Code 8 is uint16 there and uint64 here."""
    write(tmp_path / "x", np.uint64)
    np.arange(1, 8, dtype=np.uint16).tofile(tmp_path / "x.bin")
    index = bytearray((tmp_path / "x.idx").read_bytes())
    start = 9 + 25 + 4 * 5
    index[start : start + 40] = (2 * np.array([0, 3, 4, 6, 6], np.int64)).tobytes()
    (tmp_path / "x.idx").write_bytes(index)
    data = MMapIndexedDataset(tmp_path / "x")
    assert data.dtype is np.uint16 and [entry.tolist() for entry in data] == ENTRIES


@pytest.mark.parametrize("impl", ["lazy", "cached"])
def test_the_older_format(tmp_path: Path, impl: str) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "b.bin")
    for first in (10, 0):
        builder.add_item(torch.arange(first, first + 6).view(2, 3))
        builder.add_item(torch.tensor([first]))
        builder.end_document()
    builder.finalize(tmp_path / "b.idx")
    data = make_dataset(tmp_path / "b", impl)
    assert [entry.tolist() for entry in data[0:4]] == [
        [[10, 11, 12], [13, 14, 15]],
        [10],
        [[0, 1, 2], [3, 4, 5]],
        [0],
    ]
    assert data.sizes.tolist() == [2, 3, 1, 2, 3, 1] and data.doc_idx.tolist() == [0, 3, 6]
    if impl == "cached":
        data.prefetch([1, 3])
        assert data[3].tolist() == [0]
    assert pickle.loads(pickle.dumps(data))[1].tolist() == [10]
    assert module.infer_dataset_impl(tmp_path / "b") == "cached"
    with pytest.raises(IndexError):
        data[4]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(None, np.int32), (65_499, np.uint16), (65_500, np.int32)])
def test_a_builder_for_a_vocabulary(tmp_path: Path, vocab_size: int | None, dtype: type) -> None:
    builder = module.make_builder(str(tmp_path / "v.bin"), impl="mmap", vocab_size=vocab_size)
    builder.add_item(torch.tensor([1, 2]))
    builder.finalize(tmp_path / "v.idx")
    data = make_dataset(tmp_path / "v", "infer")
    assert data.dtype is dtype and data[0].tolist() == [1, 2]
    with pytest.raises(ValueError, match="'cached': only 'mmap'"):
        module.make_builder(str(tmp_path / "v.bin"), impl="cached")


def test_what_is_not_there(tmp_path: Path) -> None:
    assert (
        make_dataset(tmp_path / "no", "mmap") is None and module.infer_dataset_impl(tmp_path / "no") is None
    )
    assert module.get_available_dataset_impl() == ["lazy", "cached", "mmap"]
    assert module.IndexedCachedDataset.supports_prefetch and not module.MMapIndexedDataset.supports_prefetch
    assert make_dataset(write(tmp_path / "x"), "other") is None
    with pytest.raises(ValueError, match="not an index"):
        MMapIndexedDataset(_older(tmp_path))
    with pytest.raises(ValueError, match="not float32"):
        MMapIndexedDatasetBuilder(tmp_path / "f.bin", dtype=np.float32)


def _older(folder: Path) -> Path:
    builder = IndexedDatasetBuilder(folder / "old.bin")
    builder.finalize(folder / "old.idx")
    return folder / "old"


def test_helpers(tmp_path: Path) -> None:
    fits = {
        (0, 255): np.uint8,
        (0, 256): np.uint16,
        (0, 2**32): np.uint64,
        (-1, 100): np.int8,
        (-200, 3): np.int16,
    }
    assert {limits: find_fit_int_dtype(*limits) for limits in fits} == fits
    assert split_index(0, 10, 3) == [(0, 3), (3, 6), (6, 10)]
    assert split_dataset(range(10), 2, 1, 3) == ([(0, 5), (5, 10)], [(5, 6), (6, 8), (8, 10)])
    builder = create_mmap_dataset_builder(str(tmp_path / "h"), np.uint8)
    builder.add_item(torch.tensor([5]))
    close_mmap_dataset_builder(builder, str(tmp_path / "h"))
    assert MMapIndexedDataset(tmp_path / "h").doc_idx.tolist() == [0, 1]
