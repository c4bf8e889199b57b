"""Transfers between tensors and files with several engines, timed in one process or in several concurrently."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

from deepspeed.base.accelerator import get_accelerator
from deepspeed.ops.aio.async_io import aio_handle
from deepspeed.ops.gds.gds import gds_handle
from deepspeed.ops.io import FastFileWriter, FastFileWriterConfig

HANDLES = ("aio_handle", "aio_basic")
"""Engines that use an aio handle, which the `aio` section of a config configures."""
FLAGS = ("single_submit", "overlap_events")
"""Boolean settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One configuration for reading or writing a whole file."""

    io_size: int  # bytes
    read: bool
    engine: str = "aio_handle"
    block_size: int = 1 << 20
    queue_depth: int = 32
    single_submit: bool = False
    overlap_events: bool = True
    intra_op_parallelism: int = 1
    fast_io_size: int = 64 << 20  # bytes buffered by torch_fastio
    device: int | None = None  # index of the accelerator that holds the tensor; None: host memory
    gds: bool = False
    pinned: bool = True
    legacy_save: bool = False
    validate: bool = False

    def handle(self) -> aio_handle:
        kind = gds_handle if self.gds else aio_handle
        parallelism = 1 if self.engine == "aio_basic" else self.intra_op_parallelism
        return kind(self.block_size, self.queue_depth, self.single_submit, self.overlap_events, parallelism)


def prepare(transfer: Transfer) -> Callable[[str], object]:
    """Return a function that runs the transfer on the file at a given path. Tensors and threads are created here,
    outside the timed call."""
    handle = transfer.handle()
    buffer = _buffer(transfer, handle)
    if transfer.engine == "torch_io":
        if transfer.read:
            return lambda path: torch.load(path, weights_only=True)
        return lambda path: _save(buffer, path, transfer.legacy_save)
    if transfer.engine == "torch_fastio" and transfer.read:
        return lambda path: torch.load(path, weights_only=True)
    if transfer.engine == "torch_fastio":
        pinned = handle.new_cpu_locked_tensor(transfer.fast_io_size, torch.empty(0, dtype=torch.uint8))
        config = FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=pinned)
        return lambda path: _fast_save(buffer, path, config, transfer.legacy_save)
    move = handle.read if transfer.read else handle.write
    return lambda path: move(buffer, path, transfer.validate)


def make_file(transfer: Transfer, path: str) -> None:
    """Create a file that `transfer` can read."""
    if transfer.engine.startswith("torch"):
        torch.save(torch.zeros(transfer.io_size, dtype=torch.uint8), path)
    elif not os.path.exists(path) or os.path.getsize(path) < transfer.io_size:
        aio_handle().sync_pwrite(torch.randint(0, 255, (transfer.io_size,), dtype=torch.uint8), path)


def _buffer(transfer: Transfer, handle: aio_handle) -> Tensor:
    example = torch.empty(0, dtype=torch.uint8)
    if transfer.device is not None:
        name = get_accelerator().device_name(transfer.device)
        return torch.ones(transfer.io_size, dtype=torch.uint8, device=name)
    if transfer.pinned:
        return handle.new_cpu_locked_tensor(transfer.io_size, example).fill_(1)
    return torch.ones(transfer.io_size, dtype=torch.uint8)


def _save(buffer: Tensor, path: str, legacy: bool) -> None:
    torch.save(buffer, path, _use_new_zipfile_serialization=not legacy)
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # otherwise the page cache would be measured


def _fast_save(buffer: Tensor, path: str, config: FastFileWriterConfig, legacy: bool) -> None:
    with FastFileWriter(path, config) as writer:
        torch.save(buffer, cast(IO[bytes], writer), _use_new_zipfile_serialization=not legacy)


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """Measurement of one process in its folder."""

    transfer: Transfer
    folder: str
    name: str  # prefix of the file names; one per process
    loops: int
    warmup_loops: int = 0
    file_per_loop: bool = False


def seconds_per_loop(plan: MeasurePlan, done: Callable[[], object] = lambda: None) -> list[float]:
    """Return the time of each loop in seconds, warm-up first. Written files are removed, files to read are created and
    kept. `done` is called after each loop."""
    transfer = plan.transfer
    paths = [
        os.path.join(plan.folder, f"{plan.name}_{i if plan.file_per_loop else 0}.bin")
        for i in range(plan.warmup_loops + plan.loops)
    ]
    run, times = prepare(transfer), []
    try:
        for path in sorted(set(paths)) if transfer.read else ():
            make_file(transfer, path)
        for path in paths:
            begin = time.perf_counter()
            run(path)
            times.append(time.perf_counter() - begin)
            done()
    finally:
        if not transfer.read:
            for path in set(paths):
                Path(path).unlink(missing_ok=True)
    return times


def speeds(plans: Sequence[MeasurePlan], include_warmup: bool = False, progress: bool = False) -> list[float]:
    """Return the GB/s of each loop over all processes (bytes of all, time of the slowest); `progress` shows a bar on a
    terminal."""
    loops = plans[0].warmup_loops + plans[0].loops
    with tqdm(total=loops * len(plans), disable=None if progress else True, leave=False) as bar:
        if len(plans) == 1:
            results = [seconds_per_loop(plans[0], bar.update)]
        else:
            results = []
            with multiprocessing.get_context("spawn").Pool(len(plans)) as pool:
                for times in pool.imap(seconds_per_loop, plans, chunksize=1):
                    results.append(times)
                    bar.update(loops)
    total = sum(plan.transfer.io_size for plan in plans)
    first = 0 if include_warmup else plans[0].warmup_loops
    return [total / max(times) / 1e9 for times in list(zip(*results, strict=True))[first:]]


def check_devices(gpu: bool) -> None:
    """Raise ValueError if `gpu` is set and there is no accelerator: host memory would be measured instead."""
    if gpu and get_accelerator().device_name() == "cpu":
        raise ValueError(
            "--gpu: torch found no accelerator on this machine; leave --gpu out to measure host memory"
        )


def summary(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} GB/s (median of {len(values)}; {min(values):.2f} to {max(values):.2f})"


def aio_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `aio` section for ds_config; flags are strings, as documented."""
    flags = {name: str(settings.get(name, name == "overlap_events")).lower() for name in FLAGS}
    numbers = {name: settings.get(name) for name in ("intra_op_parallelism", "queue_depth", "block_size")}
    return {"aio": {**flags, **{name: value for name, value in numbers.items() if value is not None}}}
