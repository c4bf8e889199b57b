"""Timing of transfers, in one process or in several in parallel."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deepspeed.base.accelerator import get_accelerator
from deepspeed.tools.nvme.engines import Transfer, make_file, prepare

FLAGS = ("single_submit", "overlap_events")
"""Settings that are true or false."""


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """The work of one process in its folder."""

    transfer: Transfer
    folder: str
    name: str  # of the file; one per process
    loops: int
    warmup_loops: int = 0
    file_per_loop: bool = False


def seconds_per_loop(plan: MeasurePlan, done: Callable[[], object] = lambda: None) -> list[float]:
    """Times of the loops, warm-up first. Files that are written are removed again, files that are read are kept. `done`
    is called after each loop."""
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
    """GB/s of each loop, all processes together (the slowest one counts); `progress` shows a bar on a terminal."""
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
    """ValueError if tensors should be on an accelerator and there is none: host memory would be measured."""
    if gpu and get_accelerator().device_name() == "cpu":
        raise ValueError(
            "--gpu: this machine has no accelerator that torch can use; leave --gpu out to measure host memory"
        )


def summary(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} GB/s (median of {len(values)}; {min(values):.2f} to {max(values):.2f})"


def aio_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The `aio` section for ds_config; flags are strings, as documented."""
    flags = {name: str(settings.get(name, name == "overlap_events")).lower() for name in FLAGS}
    numbers = {name: settings.get(name) for name in ("intra_op_parallelism", "queue_depth", "block_size")}
    return {"aio": {**flags, **{name: value for name, value in numbers.items() if value is not None}}}
