"""Helpers of the tests of communication: one transport or the other, and the arithmetic to match."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm.collectives import Communicator, communicator, forget_communicators, use_shared_memory
from deepspeed.comm.transports import hosts, shared_memory
from tests import forked
from tests.pool import ROOT

TRANSPORTS = ("gloo", "shared_memory")


def shared_names() -> set[str]:
    """Return the contents of the folders in which shared memory has names."""
    folders = [folder for folder in ("/dev/shm", "/dev/mqueue") if os.path.isdir(folder)]
    return {name for folder in folders for name in os.listdir(folder)}


def names_that_stay(before: set[str], for_s: float = 10.0) -> set[str]:
    """Return the new names that remain; concurrent tests may use some for a moment."""
    new, end = shared_names() - before, time.monotonic() + for_s
    while new and time.monotonic() < end:
        time.sleep(0.05)
        new &= shared_names()
    return new


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Let the ranks believe that each half of them is on a separate host."""
    original = hosts.host_identity
    size, rank = dist.get_world_size(), dist.get_rank()
    hosts.host_identity = lambda: f"host {rank // (size // 2)}".encode()
    try:
        yield
    finally:
        hosts.host_identity = original


@contextlib.contextmanager
def using(transport: str) -> Iterator[Communicator]:
    """The default group's communicator on this transport."""
    if transport != "gloo" and not shared_memory.is_available():
        pytest.skip("no native library")
    forget_communicators()
    use_shared_memory(transport != "gloo")
    try:
        found = communicator(dist.group.WORLD)
        assert found.size == 1 or found.transport_name("cpu") == transport
        yield found
    finally:
        forget_communicators()
        use_shared_memory(True)


def values(numel: int, dtype: torch.dtype, rank: int, seed: int = 0) -> Tensor:
    """Return a rank's contribution, which any other rank can compute too."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return (torch.randn(numel, generator=generator) * 10).to(dtype)
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)


def rank_order_sum(parts: Sequence[Tensor], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """(x0 + x1 + ...) * scale in the accumulation dtype, one rounding at the end."""
    kept = parts[0].dtype == torch.float64 or not parts[0].dtype.is_floating_point
    wide = parts[0].dtype if kept else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return (total * scale if scale != 1.0 else total).to(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def run_two_ranks(text: str, folder: Path) -> tuple[tuple[int, int], str, float]:
    """Run ``text`` as a script on two processes that meet at TEST_STORE: their exit codes, what the first printed, and
    the seconds that it took."""
    script = folder / "script.py"
    script.write_text(text)
    common = {
        **os.environ,
        "TEST_STORE": f"file://{folder}/store",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    ranks = [
        forked.start([str(script)], cwd=folder, env={**common, "RANK": str(rank)}, merged=True)
        for rank in range(2)
    ]
    start = time.monotonic()
    try:
        output, _ = ranks[0].communicate(timeout=60)
        ranks[1].communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
    return (ranks[0].returncode, ranks[1].returncode), output, time.monotonic() - start
