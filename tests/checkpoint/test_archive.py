"""Files written without copying tensors: what ``torch.load`` gives back, and what is refused."""

from __future__ import annotations

import argparse
import datetime
import decimal
import pathlib
import random
import types
import uuid
import zlib
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.files.archive_reader import open_archive, read_archive, tensor_records
from deepspeed.checkpoint.files.archive_writer import LazyTensor, write_archive
from deepspeed.checkpoint.files.hashing import BLOCK
from deepspeed.checkpoint.names import CHECKSUMS


class Foreign:
    """A class that is not allowed."""


TENSORS = {
    "plain": torch.randn(4, 5),
    "view of a large buffer": torch.randn(100_000)[10:20],
    "transposed": torch.randn(4, 5).t(),
    "bfloat16": torch.randn(3).bfloat16(),
    "float16": torch.randn(3).half(),
    "float8": torch.randn(4).to(torch.float8_e4m3fn).view(torch.uint8),
    "empty": torch.empty(0, 3),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5),
    "int64": torch.arange(5),
    "complex": torch.randn(2, dtype=torch.complex64),
    "conjugated": torch.randn(2, dtype=torch.complex64).conj(),
    "double": torch.randn(3, dtype=torch.float64),
    "gradient": torch.randn(3, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back_with_a_storage_of_their_own_size(tmp_path, name):
    tensor = TENSORS[name]
    write_archive(tmp_path / "f.pt", {"t": tensor})
    for loaded in (read_archive(tmp_path / "f.pt")["t"], torch.load(tmp_path / "f.pt")["t"]):
        assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor)
        assert loaded.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_shared_memory_is_written_once_and_shared_again(tmp_path):
    weight = nn.Parameter(torch.randn(50, 50))
    size = write_archive(
        tmp_path / "f.pt", {"emb": weight.detach(), "head": weight.detach(), "again": weight}
    )
    assert size < 1.5 * weight.numel() * 4
    loaded = torch.load(tmp_path / "f.pt")
    assert loaded["emb"].data_ptr() == loaded["head"].data_ptr() == loaded["again"].data_ptr()


def test_lazy_tensors_are_made_when_their_turn_comes(tmp_path):
    alive: list[int] = []

    def parts():
        for start in range(3):
            alive.append(start)
            yield torch.arange(start, start + 2)

    lazy = LazyTensor((6,), torch.int64, parts)
    write_archive(tmp_path / "f.pt", {"lazy": lazy}, checksums=True)
    loaded = torch.load(tmp_path / "f.pt")
    assert loaded["lazy"].tolist() == [0, 1, 1, 2, 2, 3] and alive == [0, 1, 2]
    assert loaded[CHECKSUMS].numpy().view(np.uint32).tolist() == [zlib.crc32(loaded["lazy"].numpy())]


def test_structure_survives(tmp_path):
    t = torch.randn(3)
    content = OrderedDict(a=[t, {"b": (t, 1, None)}], c=OrderedDict(x=torch.ones(2)))
    content._metadata = {"version": 2}  # type: ignore[attr-defined] - as state dicts have it
    write_archive(tmp_path / "f.pt", {"module": content, "sparse": torch.eye(3).to_sparse()})
    loaded = read_archive(tmp_path / "f.pt")
    assert loaded["module"]._metadata == {"version": 2}
    assert torch.equal(loaded["module"]["a"][1]["b"][0], t)
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))


CLIENT_DATA = {
    "path": pathlib.Path("/x/y"),
    "pure": pathlib.PureWindowsPath("c:/x"),
    "date": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc),
    "delta": datetime.timedelta(days=1),
    "float32": np.float32(2.5),
    "bool_": np.bool_(True),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "fortran": np.asfortranarray(np.ones((2, 3))),
    "strings": np.array(["a", "bc"]),
    "namespace": argparse.Namespace(lr=0.1, path=pathlib.Path("z")),
    "simple": types.SimpleNamespace(a=[1, 2]),
    "uuid": uuid.UUID(int=5),
    "decimal": decimal.Decimal("1.50"),
    "deque": deque([1, 2], maxlen=3),
    "defaultdict": defaultdict(list, {1: [2]}),
    "set": {1, 2},
    "frozenset": frozenset([1]),
    "slice": slice(1, None, 2),
    "bytes": b"\x00\xff",
    "big": 10**30,
    "inf": float("inf"),
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "size": torch.Size([1, 2]),
}


@pytest.mark.parametrize("name", CLIENT_DATA)
def test_data_that_clients_save(tmp_path, name):
    value = CLIENT_DATA[name]
    write_archive(tmp_path / "f.pt", {"client": value})
    loaded = read_archive(tmp_path / "f.pt")["client"]
    assert type(loaded) is type(value)
    if isinstance(value, np.ndarray):
        np.testing.assert_array_equal(loaded, value)
    else:
        assert loaded == value


def test_unknown_classes_are_refused_before_the_data_is_written(tmp_path):
    content = {"weights": torch.randn(1000), "mine": {"deep": [Foreign()]}, "fine": 3}
    with pytest.raises(CheckpointError, match=r"Foreign under 'mine'.*add_safe_globals") as caught:
        write_archive(tmp_path / "f.pt", content)
    assert "'fine'" not in str(caught.value)
    with torch.serialization.safe_globals([Foreign]):
        write_archive(tmp_path / "f.pt", content)
        assert isinstance(read_archive(tmp_path / "f.pt")["mine"]["deep"][0], Foreign)
    with pytest.raises(CheckpointError, match=r"f\.pt holds an object of class .*Foreign"):
        read_archive(tmp_path / "f.pt")


def test_bare_storages_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="a bare storage"):
        write_archive(tmp_path / "f.pt", {"s": torch.ones(3).untyped_storage()})


def damaged(content: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "text": b"hello world",
        "cut short": content[:-50],
        "beginning only": content[:700],
        "end only": content[700:],
        "garbled structure": content.replace(b"weights", b"\x80\xff\x00wei"),
    }


@pytest.mark.parametrize("kind", damaged(b""))
def test_damaged_files_are_named(tmp_path, kind):
    path = tmp_path / "model.pt"
    write_archive(path, {"weights": torch.randn(500)})
    path.write_bytes(damaged(path.read_bytes())[kind])
    with pytest.raises(CheckpointError, match=r"model\.pt.*(damaged|truncated)"):
        read_archive(path)
    with pytest.raises(CheckpointNotFoundError, match=r"nothing\.pt does not exist"):
        read_archive(tmp_path / "nothing.pt")


def test_conjugated_and_negated_views_are_not_what_they_view(tmp_path):
    x = torch.randn(4, dtype=torch.complex64)
    saved = {"x": x, "conj": x.conj(), "imag": x.imag, "neg": x.conj().imag, "again": x.conj()}
    write_archive(tmp_path / "f.pt", saved)
    loaded = read_archive(tmp_path / "f.pt")
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert loaded["conj"].data_ptr() == loaded["again"].data_ptr() != loaded["x"].data_ptr()


def hashed(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A file with tensors of all sizes: below one block, some blocks, more than is read at once."""
    sizes = [1, 100, 5000, 3 * BLOCK // 4, 100_000, 700_001]
    content: dict[str, Any] = {f"t{size}": torch.randn(size) for size in sizes}
    content |= {"odd": torch.randint(0, 255, (2 * BLOCK + 3,), dtype=torch.uint8), "none": torch.empty(0)}
    write_archive(folder / "f.pt", {"client": content, "half": torch.randn(77).bfloat16()}, checksums=True)
    return folder / "f.pt", content


def test_hashes_are_the_crc_of_each_block(tmp_path):
    path, content = hashed(tmp_path)
    loaded = torch.load(path)
    found = loaded[CHECKSUMS].numpy().view(np.uint32).tolist()
    expected = []
    for tensor in [*content.values(), loaded["half"].view(torch.int16)]:
        data = tensor.numpy().tobytes()
        expected += [zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    assert found == expected


def test_every_byte_of_every_tensor_is_covered(tmp_path):
    path, _ = hashed(tmp_path)
    good, rng = path.read_bytes(), random.Random(0)
    spans = [(offset, nbytes) for offset, nbytes in tensor_records(path).values() if nbytes]
    for offset, nbytes in spans * 3:
        data = bytearray(good)
        data[offset + rng.randrange(nbytes)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"f\.pt is damaged"):
            open_archive(path).verify_rest([])
    path.write_bytes(good)
    open_archive(path).verify_rest([])


def test_blocks_that_changed_places_are_found(tmp_path):
    """Their sum would be the same."""
    path, content = hashed(tmp_path)
    data = bytearray(path.read_bytes())
    where = bytes(data).index(content["t100000"].numpy().tobytes())
    one, other = slice(where, where + BLOCK), slice(where + 3 * BLOCK, where + 4 * BLOCK)
    data[one], data[other] = data[other], data[one]
    path.write_bytes(data)
    archive = open_archive(path)
    tensor = archive.content["client"]["t100000"]
    archive.verify(tensor[BLOCK // 4 : 3 * BLOCK // 4])  # blocks 1 and 2 are as they were
    with pytest.raises(CheckpointError, match="damaged"):
        archive.verify(tensor[10:20])


def test_a_reader_verifies_no_more_than_the_blocks_that_it_touches(tmp_path):
    path, _ = hashed(tmp_path)
    archive = open_archive(path)
    tensor = archive.content["client"]["t100000"]
    assert archive.verify(tensor[:10]) == BLOCK
    assert archive.verify(tensor[5:100]) == 0, "it is known already"
    assert archive.verify(tensor[BLOCK // 4 - 1 : BLOCK // 4 + 1]) == BLOCK
    assert archive.verify(tensor.view(100, 1000)[::20, 3]) == (400_000 // BLOCK + 1 - 2 - 5) * BLOCK
    assert archive.verify(tensor[-1:]) == 400_000 % BLOCK


def test_written_storages_can_still_be_resized(tmp_path):
    """Gathered weights are released by resizing their storage, which ``Tensor.numpy`` would forbid for good."""
    tensor = torch.randn(500)
    write_archive(tmp_path / "f.pt", {"t": tensor})
    tensor.untyped_storage().resize_(0)
    assert read_archive(tmp_path / "f.pt")["t"].numel() == 500
