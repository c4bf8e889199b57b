"""`aio_handle` against plain Python files, on each backend."""

from __future__ import annotations

import errno
import gc
import itertools
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deepspeed.ops.aio import AsyncIOBuilder
from deepspeed.ops.aio.engine import BACKEND_VARIABLE, PYTHON, TRANSPORTS, library

op = AsyncIOBuilder().load()
needs_library = pytest.mark.skipif(library() is None, reason="built without the native library")


@pytest.fixture(params=[*TRANSPORTS, PYTHON])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(BACKEND_VARIABLE, request.param)
    if request.param != PYTHON and op.aio_handle().backend != request.param:
        pytest.skip(f"{request.param} is not available here")
    return request.param


def random_bytes(numel: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def contents(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def test_settings_and_their_defaults() -> None:
    handle = op.aio_handle()
    assert (handle.get_block_size(), handle.get_queue_depth()) == (1048576, 128)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (False, False)
    assert handle.get_intra_op_parallelism() == 1 and handle.get_alignment() % 512 == 0
    other = op.aio_handle(4096, 3, True, True, 2)
    assert (other.get_block_size(), other.get_queue_depth(), other.get_intra_op_parallelism()) == (4096, 3, 2)
    assert other.get_single_submit() and other.get_overlap_events()
    for wrong in ({"block_size": 0}, {"queue_depth": -1}, {"intra_op_parallelism": True}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*at least 1"):
            op.aio_handle(**wrong)


@pytest.mark.parametrize("single_submit", [False, True])
@pytest.mark.parametrize("overlap_events", [False, True])
def test_any_size_offset_and_address(
    tmp_path: Path, backend: str, single_submit: bool, overlap_events: bool
) -> None:
    draw = random.Random(7)
    handle = op.aio_handle(16384, 4, single_submit, overlap_events, 2)
    source, path = random_bytes(1 << 19), tmp_path / "file"
    for _ in range(25):
        size, shift = draw.randrange(0, 1 << 18), draw.choice([0, 512, draw.randrange(5000)])
        offset = draw.choice([0, 4096, draw.randrange(1 << 17)])
        expected = bytearray(contents(path).ljust(offset + size, b"\0"))
        expected[offset : offset + size] = source[shift : shift + size].numpy().tobytes()
        assert handle.sync_pwrite(source[shift : shift + size], str(path), offset) == 1
        assert contents(path) == bytes(expected)
        target = torch.zeros(size + shift + 64, dtype=torch.uint8)
        assert handle.sync_pread(target[shift : shift + size], str(path), offset) == 1
        assert torch.equal(target[shift : shift + size], source[shift : shift + size])
        assert not target[:shift].any() and not target[shift + size :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes_and_shapes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(3 * 5 * 7).reshape(3, 5, 7).to(dtype)
    op.aio_handle().sync_pwrite(tensor, str(tmp_path / "t"))
    assert (tmp_path / "t").stat().st_size == tensor.numel() * tensor.element_size()
    back = torch.empty_like(tensor)
    op.aio_handle().sync_pread(back, str(tmp_path / "t"))
    assert torch.equal(back, tensor)


def test_wait_counts_operations(tmp_path: Path, backend: str) -> None:
    handle = op.aio_handle(65536, 8, intra_op_parallelism=4)
    assert handle.wait() == 0
    tensors = [random_bytes(300_000 + i, seed=i) for i in range(5)]
    for i, tensor in enumerate(tensors):
        assert handle.async_pwrite(tensor, str(tmp_path / f"{i}")) == 0
    assert handle.wait() == 5 and handle.wait() == 0
    targets = [torch.empty_like(tensor) for tensor in tensors]
    for i, target in enumerate(targets):
        assert handle.pread(target, str(tmp_path / f"{i}"), True, True) == 0
    assert handle.wait() == 5
    assert all(torch.equal(a, b) for a, b in zip(tensors, targets, strict=True))
    assert handle.pwrite(tensors[0], str(tmp_path / "0"), True, False) == 1
    assert handle.read(targets[0], str(tmp_path / "0"), True) == 1


def test_adjacent_parts_of_one_file_at_once(tmp_path: Path, backend: str) -> None:
    """Neighbours share pages: no write may undo another."""
    whole, path = random_bytes(1_000_003), tmp_path / "file"
    handles = [op.aio_handle(32768, 4, intra_op_parallelism=2) for _ in range(3)]
    cuts = [0, 1, 700, 50_001, 333_333, 600_000, 600_513, 1_000_003]
    for i, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        handles[i % 3].async_pwrite(whole[begin:end], str(path), begin)
    assert sum(handle.wait() for handle in handles) == len(cuts) - 1
    assert contents(path) == whole.numpy().tobytes()


def test_adjacent_parts_of_a_file_that_is_in_the_page_cache(tmp_path: Path, backend: str) -> None:
    """Somebody reads the file by other ways: its pages, large and small, are in the cache while neighbours are written
    past it and through it."""
    path, size = tmp_path / "file", 1 << 20
    handles, draw = [op.aio_handle(65536, 8, False, True) for _ in range(3)], random.Random(5)
    handles[0].sync_pwrite(random_bytes(size), str(path))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        for turn in range(12):
            whole = random_bytes(size, seed=turn)
            cuts = sorted({0, size, *(draw.randrange(size) for _ in range(16))})
            for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
                handles[i % 3].async_pwrite(whole[begin:end], str(path), begin)
                mapped[draw.randrange(size)]
            assert sum(handle.wait() for handle in handles) == len(cuts) - 1
            target = torch.empty_like(whole)
            handles[0].sync_pread(target, str(path))
            assert torch.equal(target, whole)
            assert contents(path) == mapped[:] == whole.numpy().tobytes()


def test_a_descriptor_and_a_longer_file(tmp_path: Path) -> None:
    path, tensor = tmp_path / "file", random_bytes(10_000)
    path.write_bytes(b"x" * 30_000)
    handle = op.aio_handle()
    with open(path, "r+b") as file:
        handle.async_pwrite(tensor, file.fileno(), 5)
        assert handle.wait() == 1
    assert contents(path) == b"x" * 5 + tensor.numpy().tobytes() + b"x" * 19_995


def test_locked_memory() -> None:
    handle, example = op.aio_handle(), torch.empty(0, dtype=torch.float16)
    for numel in (0, 3, 5 << 20):
        tensor = handle.new_cpu_locked_tensor(numel, example)
        assert tensor.shape == (numel,) and tensor.dtype == torch.float16 and handle.is_pinned(tensor)
        assert numel == 0 or tensor.data_ptr() % handle.get_alignment() == 0
        assert tensor.untyped_storage().nbytes() == 2 * numel and not tensor.any()
        assert handle.free_cpu_locked_tensor(tensor) and not handle.free_cpu_locked_tensor(tensor)
    assert not handle.is_pinned(example)
    with pytest.raises(ValueError, match="num_elem = -1"):
        handle.new_cpu_locked_tensor(-1, example)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts pages in /proc")
def test_locked_memory_is_resident_and_no_more_than_asked_for() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    handle, nbytes = op.aio_handle(), (37 << 20) + 4096 * 3
    before = resident()
    tensor = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    assert nbytes <= resident() - before < nbytes + (1 << 20)
    tensor.fill_(1)
    assert resident() - before < nbytes + (1 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_tensors(tmp_path: Path) -> None:
    tensor, path = random_bytes(1_000_001).cuda(), tmp_path / "file"
    handle, target = op.aio_handle(), torch.zeros(1_000_001, dtype=torch.uint8, device="cuda")
    handle.async_pwrite(tensor, str(path))
    assert handle.wait() == 1 and contents(path) == tensor.cpu().numpy().tobytes()
    handle.async_pread(target, str(path))
    assert handle.wait() == 1 and torch.equal(target, tensor)


def test_errors_name_number_file_and_offset(tmp_path: Path, backend: str) -> None:
    handle, tensor = op.aio_handle(), random_bytes(10_000)
    missing, short = str(tmp_path / "missing"), str(tmp_path / "short")
    Path(short).write_bytes(b"x" * 9_000)
    with pytest.raises(FileNotFoundError) as caught:
        handle.async_pread(tensor, missing)
    assert caught.value.errno == errno.ENOENT and caught.value.filename == missing
    with pytest.raises(OSError, match=r"too short \(9000 bytes\).*10000 bytes at offset 100") as caught:
        handle.sync_pread(tensor, short, 100)
    assert caught.value.errno == errno.ENODATA and caught.value.filename == short
    assert caught.value.offset == 100
    with pytest.raises(IsADirectoryError):
        handle.sync_pwrite(tensor, str(tmp_path))
    with pytest.raises(NotADirectoryError):
        handle.sync_pwrite(tensor, short + "/file")
    assert handle.wait() == 0 and handle.sync_pwrite(tensor, missing) == 1


def test_what_vanished_or_shrank_between_calls(tmp_path: Path, backend: str) -> None:
    folder = tmp_path / "swap"
    folder.mkdir()
    handle, tensor, path = op.aio_handle(), random_bytes(100_000), str(folder / "file")
    handle.sync_pwrite(tensor, path)
    os.truncate(path, 50_000)
    with pytest.raises(OSError, match=r"too short \(50000 bytes\).*60000 bytes at offset 40000") as caught:
        handle.sync_pread(tensor[:60_000], path, 40_000)
    assert (caught.value.errno, caught.value.filename, caught.value.offset) == (errno.ENODATA, path, 40_000)
    os.unlink(path)
    with pytest.raises(FileNotFoundError) as caught:
        handle.sync_pread(tensor, path)
    assert caught.value.filename == path
    folder.rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        handle.async_pwrite(tensor, path, 4096)
    assert (caught.value.filename, caught.value.offset) == (path, 4096)
    assert handle.wait() == 0


def test_arguments_are_checked(tmp_path: Path) -> None:
    handle = op.aio_handle()
    with pytest.raises(ValueError, match="not contiguous"):
        handle.sync_pwrite(torch.zeros(4, 4).t(), str(tmp_path / "f"))
    with pytest.raises(ValueError, match="file_offset = -1"):
        handle.sync_pwrite(torch.zeros(4), str(tmp_path / "f"), -1)
    with pytest.raises(TypeError, match="bytes"):
        handle.sync_pwrite(b"data", str(tmp_path / "f"))


def test_a_wrong_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "floppy")
    with pytest.raises(ValueError, match="DS_AIO_BACKEND='floppy'.*io_uring"):
        _ = op.aio_handle().backend


def test_a_file_cannot_grow_beyond_its_limit(tmp_path: Path, backend: str) -> None:
    """EFBIG by RLIMIT_FSIZE stands for what the disk refuses while the write is under way."""
    handle, path = op.aio_handle(), tmp_path / "file"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            handle.sync_pwrite(random_bytes(1 << 20), str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(path)
    assert handle.sync_pwrite(random_bytes(1 << 20), str(path)) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        pytest.skip("only root can mount")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_disk(small_disk: Path, backend: str) -> None:
    handle, path = op.aio_handle(65536), str(small_disk / "file")
    with pytest.raises(OSError, match="No space left") as caught:
        handle.async_pwrite(random_bytes(4 << 20), path)
        handle.wait()
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == path
    assert handle.sync_pwrite(random_bytes(1000), path) == 1


def test_read_only_disk(small_disk: Path, backend: str) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match="Read-only") as caught:
        op.aio_handle().sync_pwrite(random_bytes(10), str(small_disk / "file"))
    assert caught.value.errno == errno.EROFS


def test_concurrent_handles(tmp_path: Path, backend: str) -> None:
    handles = [op.aio_handle(65536, 4, intra_op_parallelism=2) for _ in range(4)]
    tensors = [random_bytes(2_000_001 + i, seed=i) for i in range(4)]
    for _ in range(3):
        for i, handle in enumerate(handles):
            handle.async_pwrite(tensors[i], str(tmp_path / f"{i}"))
        assert [handle.wait() for handle in handles] == [1] * 4
    for i, tensor in enumerate(tensors):
        assert contents(tmp_path / f"{i}") == tensor.numpy().tobytes()


def test_a_dropped_handle_completes_what_it_began(tmp_path: Path, backend: str) -> None:
    tensor, path = random_bytes(3_000_000), tmp_path / "file"
    handle = op.aio_handle(65536)
    handle.async_pwrite(tensor, str(path))
    del handle
    assert contents(path) == tensor.numpy().tobytes()


@needs_library
def test_a_forked_child_has_its_own_threads(tmp_path: Path) -> None:
    code = """
        import os, sys, torch
        from deepspeed.ops.aio import AsyncIOBuilder
        handle = AsyncIOBuilder().load().aio_handle()
        handle.sync_pwrite(torch.ones(1000), sys.argv[1])
        child = os.fork()
        if child == 0:
            handle.sync_pwrite(torch.zeros(1000), sys.argv[1])
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "file")]
    subprocess.run(command, check=True, timeout=240)
    assert contents(tmp_path / "file") == bytes(4000)


def test_killed_while_writing(tmp_path: Path) -> None:
    code = """
        import sys, torch
        from deepspeed.ops.aio import AsyncIOBuilder
        handle, tensor = AsyncIOBuilder().load().aio_handle(), torch.ones(64 << 20, dtype=torch.uint8)
        print("begin", flush=True)
        while True:
            handle.async_pwrite(tensor, sys.argv[1])
            handle.wait()
    """
    path = tmp_path / "file"
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"begin\n"
        time.sleep(0.2)
        process.kill()
    tensor = random_bytes(1_234_567)
    handle = op.aio_handle()
    handle.sync_pwrite(tensor, str(path))
    target = torch.empty_like(tensor)
    handle.sync_pread(target, str(path))
    assert torch.equal(tensor, target)


def test_functions_of_the_module(tmp_path: Path) -> None:
    tensor, path = torch.arange(1000.0), str(tmp_path / "f")
    assert op.aio_write(tensor, path, 4096, 8, False, True, True) == 1
    target = torch.empty_like(tensor)
    assert op.aio_read(target, path, 4096, 8, False, True, True) == 1 and torch.equal(target, tensor)
    copied = torch.empty(500, dtype=torch.float64)
    op.deepspeed_memcpy(copied, tensor)
    assert torch.equal(copied.view(torch.float32), tensor)


def test_files_by_descriptor_under_the_documented_keywords(tmp_path: Path) -> None:
    path, handle = tmp_path / "file", op.aio_handle()
    path.write_bytes(b"x" * 4096)
    tensor, back = torch.arange(100.0), torch.empty(100)
    with open(path, "r+b") as file:
        fd = file.fileno()
        assert handle.async_pwrite(buffer=tensor, fd=fd, file_offset=8) == 0 and handle.wait() == 1
        assert path.read_bytes()[8:408] == tensor.numpy().tobytes()
        assert handle.sync_pread(buffer=back, fd=fd, file_offset=8) == 1 and torch.equal(back, tensor)
        assert handle.sync_pwrite(buffer=tensor + 1, fd=fd) == 1
        assert handle.async_pread(buffer=back, fd=fd) == 0 and handle.wait() == 1
        assert torch.equal(back, tensor + 1)
        assert handle.pwrite(tensor, fd, True, False, 16) == 1
        assert handle.pread(buffer=back, fd=fd, validate=True, file_offset=16) == 1 and torch.equal(
            back, tensor
        )
        for names in ({}, {"filename": str(path), "fd": fd}):
            with pytest.raises(TypeError, match="either filename or fd"):
                handle.sync_pwrite(tensor, **names)


def test_locked_memory_is_pinned_for_every_handle_and_view() -> None:
    first, second = op.aio_handle(), op.aio_handle()
    tensor = first.new_cpu_locked_tensor(10_000, torch.empty(0))
    for seen in (
        tensor,
        tensor[10:20],
        tensor.view(100, 100).t(),
        tensor.view(torch.uint8),
        nn.Parameter(tensor),
    ):
        assert first.is_pinned(seen) and second.is_pinned(seen)
    assert not second.is_pinned(torch.empty(10_000)) and not second.is_pinned(tensor.clone())
    view = tensor[5:]
    assert not second.free_cpu_locked_tensor(tensor) and first.free_cpu_locked_tensor(tensor)
    assert second.is_pinned(view)  # the memory is locked as long as something lies in it
    if torch.accelerator.is_available():
        return  # torch keeps pinned memory for the next one
    from deepspeed.ops.aio import memory

    address = view.untyped_storage().data_ptr()
    assert address in memory._mappings
    del tensor, view, seen
    gc.collect()
    assert address not in memory._mappings
