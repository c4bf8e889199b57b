"""`gds_handle`: refused where it cannot work; its use of cuFile against a stand-in that moves host memory."""

from __future__ import annotations

import ctypes
import errno
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.ops.aio.async_io import aio_handle
from deepspeed.ops.gds import GDSBuilder, cufile, gds
from deepspeed.ops.gds.cufile import _parts, _Status


def random_bytes(numel: int) -> torch.Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(numel))


class StandIn:
    """A fake of cuFile for host memory, which may transfer in pieces, as cuFile does."""

    def __init__(self) -> None:
        self.files: dict[int, int] = {}  # handle -> descriptor
        self.pinned: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []  # file offset, bytes
        self.driver = self.registration = 0  # errors to answer
        self.failure = 0  # what transfers answer instead of moving

    def cuFileDriverOpen(self) -> _Status:
        return _Status(self.driver, 0)

    def cuFileHandleRegister(self, handle: Any, description: Any) -> _Status:
        found = description._obj
        assert found.kind == 1 and not found.operations
        if self.registration == 0:
            handle._obj.value = 1000 + len(self.files)
            self.files[handle._obj.value] = found.source.descriptor
        return _Status(self.registration, 0)

    def cuFileHandleDeregister(self, handle: Any) -> None:
        del self.files[handle.value]

    def cuFileBufRegister(self, address: int, nbytes: int, flags: int) -> _Status:
        assert flags == 0 and address not in self.pinned
        self.pinned[address] = nbytes
        return _Status(0, 0)

    def cuFileBufDeregister(self, address: int) -> _Status:
        del self.pinned[address]
        return _Status(0, 0)

    def cuFileRead(self, handle: Any, base: int, nbytes: int, offset: int, base_offset: int) -> int:
        return self._move(False, handle, base + base_offset, nbytes, offset)

    def cuFileWrite(self, handle: Any, base: int, nbytes: int, offset: int, base_offset: int) -> int:
        return self._move(True, handle, base + base_offset, nbytes, offset)

    def _move(self, write: bool, handle: Any, address: int, nbytes: int, offset: int) -> int:
        if self.failure:
            ctypes.set_errno(errno.ENOSPC)
            return self.failure
        nbytes = min(nbytes, 50_000)
        self.calls.append((offset, nbytes))
        memory = (ctypes.c_char * nbytes).from_address(address)
        with open(f"/proc/self/fd/{self.files[handle.value]}", "r+b" if write else "rb") as file:
            file.seek(offset)
            return file.write(memory) if write else file.readinto(memory)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    lib = StandIn()
    monkeypatch.setattr(gds, "why_not", lambda: "")
    monkeypatch.setattr(cufile, "library", lambda: lib)
    yield lib
    assert not lib.files


def test_refused_with_what_to_use_instead() -> None:
    if gds.is_available():
        pytest.skip("works here")
    builder = GDSBuilder()
    assert not builder.is_compatible() and "aio_handle" in builder.why_not()
    with pytest.raises(NotImplementedError, match="gds_handle needs .*Use aio_handle"):
        gds.gds_handle()


def test_the_interface_is_that_of_aio_handle() -> None:
    assert inspect.signature(gds.gds_handle.__init__) == inspect.signature(aio_handle.__init__)
    more = {
        "new_pinned_device_tensor",
        "free_pinned_device_tensor",
        "pin_device_tensor",
        "unpin_device_tensor",
    }
    names = {name for name in dir(gds.gds_handle) if not name.startswith("_")}
    assert names - {name for name in dir(aio_handle) if not name.startswith("_")} == more


def test_parts_of_an_operation_share_no_page() -> None:
    for offset, nbytes, count in ((0, 1 << 20, 4), (5, 100_000, 3), (4000, 200, 4), (1, 4096, 2), (7, 0, 2)):
        parts = _parts(offset, nbytes, count)
        assert sum(end - begin for begin, end in parts) == nbytes and len(parts) <= count
        assert all((offset + begin) % 4096 == 0 for begin, _ in parts[1:])
        assert [end for _, end in parts[:-1]] == [begin for begin, _ in parts[1:]]
    assert len(_parts(5, 100_000, 3)) == 3


@pytest.mark.parametrize("parallelism", [1, 3])
def test_transfers(stand_in: StandIn, tmp_path: Path, parallelism: int) -> None:
    handle = gds.gds_handle(intra_op_parallelism=parallelism)
    tensor, path = random_bytes(300_001), str(tmp_path / "file")
    assert handle.backend == "cufile" and handle.sync_pwrite(tensor, path, 5) == 1
    assert Path(path).read_bytes()[5:] == tensor.numpy().tobytes()
    target = torch.zeros_like(tensor)
    assert handle.async_pread(target, path, 5) == 0 and handle.async_pread(target[:0], path) == 0
    assert handle.wait() == 2 and torch.equal(target, tensor)
    assert len(stand_in.calls) >= 2 * max(parallelism, 300_001 // 50_000)
    assert handle.read(target, path, True, 5) == 1 and handle.wait() == 0


def test_pinned_memory(stand_in: StandIn) -> None:
    handle = gds.gds_handle()
    tensor = handle.new_pinned_device_tensor(100, torch.empty(0, dtype=torch.float16))
    assert tensor.shape == (100,) and stand_in.pinned == {tensor.data_ptr(): 200} and handle.is_pinned(tensor)
    assert handle.free_pinned_device_tensor(tensor) and not handle.free_pinned_device_tensor(tensor)
    other = torch.zeros(7)
    assert not handle.is_pinned(other) and handle.pin_device_tensor(other) and handle.pin_device_tensor(other)
    assert handle.unpin_device_tensor(other) and not stand_in.pinned
    with pytest.raises(ValueError, match="on the GPU, not on meta"):
        handle.pin_device_tensor(torch.empty(3, device="meta"))


def test_errors(stand_in: StandIn, tmp_path: Path) -> None:
    handle, tensor, path = gds.gds_handle(), random_bytes(10_000), str(tmp_path / "file")
    with pytest.raises(FileNotFoundError) as caught:
        handle.sync_pread(tensor, path)
    assert caught.value.filename == path
    handle.sync_pwrite(tensor, path)
    with pytest.raises(OSError, match=r"too short \(10000 bytes\)") as caught:
        handle.sync_pread(tensor, path, 1)
    assert caught.value.errno == errno.ENODATA
    descriptors = len(os.listdir("/proc/self/fd"))
    stand_in.failure = -1
    with pytest.raises(OSError, match="No space left") as caught:
        handle.sync_pwrite(tensor, path, 4096)
    assert (caught.value.errno, caught.value.filename, caught.value.offset) == (errno.ENOSPC, path, 4096)
    stand_in.failure = -5025
    with pytest.raises(PermissionError, match="cuFile error 5025"):
        handle.sync_pwrite(tensor, path)
    stand_in.failure, stand_in.registration = 0, 5008
    with pytest.raises(OSError, match="not supported: cuFile error 5008"):
        handle.sync_pread(tensor, path)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    stand_in.driver = 5001
    with pytest.raises(OSError, match="failed to start .error 5001"):
        gds.gds_handle()


@pytest.mark.gpu
@pytest.mark.skipif(not gds.is_available(), reason="needs a GPU and cuFile")
def test_device_tensors(tmp_path: Path) -> None:
    handle, tensor, path = (
        gds.gds_handle(intra_op_parallelism=2),
        random_bytes(1_000_001).cuda(),
        tmp_path / "file",
    )
    assert handle.pin_device_tensor(tensor)
    handle.async_pwrite(tensor, str(path), 3)
    assert handle.wait() == 1 and path.read_bytes()[3:] == tensor.cpu().numpy().tobytes()
    target = handle.new_pinned_device_tensor(1_000_001, tensor)
    assert handle.sync_pread(target, str(path), 3) == 1 and torch.equal(target, tensor)
    assert handle.unpin_device_tensor(tensor) and handle.free_pinned_device_tensor(target)
