"""Speed of each op on this machine: short measurements for `ds_report --bench`, on the path that the op would take."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.numa import available_cores
from deepspeed.comm.transports import shared_memory
from deepspeed.ops import native
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.aio.async_io import aio_handle
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.flat_tensors import flatten
from deepspeed.ops.sgd import SGD

SECONDS = 0.25  # per measurement, at least three calls
NUMEL = 8 << 20  # elements of an operand: larger than most caches
FILE_BYTES = 64 << 20
OPTIMIZERS: dict[str, Callable[..., MultiTensorOptimizer]] = {
    "cpu_adam": DeepSpeedCPUAdam,
    "cpu_adagrad": DeepSpeedCPUAdagrad,
    "cpu_lion": DeepSpeedCPULion,
    "fused_adam": FusedAdam,
    "fused_lamb": FusedLamb,
    "fused_lion": FusedLion,
}


@dataclass(frozen=True, slots=True)
class Speed:
    """Work done in a number of seconds; `what` describes it."""

    what: str
    nbytes: int
    seconds: float
    numel: int = 0  # 0: not meaningful for this op

    def __str__(self) -> str:
        text = f"{self.nbytes / self.seconds / 1e9:.1f} GB/s"
        if self.numel:
            text = f"{self.numel / self.seconds / 1e6:.0f} M elements/s, {text}"
        return f"{text} ({self.what})"


def of_op(builder: OpBuilder, folder: str | None = None) -> list[Speed]:
    """Measure an op; an empty list if it cannot be used or there is nothing to time. `folder`: for `async_io`'s
    file."""
    if not builder.path():
        return []
    if builder.NAME in OPTIMIZERS:
        on_host = builder.NAME.startswith("cpu_") or get_accelerator().device_name() == "cpu"
        device = "cpu" if on_host else get_accelerator().current_device_name()
        return [_optimizer(OPTIMIZERS[builder.NAME], torch.device(device))]
    if builder.NAME == "async_io":
        return _files(folder or tempfile.gettempdir())
    if builder.NAME == "deepspeed_shm_comm":
        return _shared_memory()
    if builder.NAME == "utils":
        return [_flatten()]
    return []


def of_other_kernels() -> dict[str, Speed]:
    """Measure the host kernels that are not part of a documented op."""
    values = torch.randn(NUMEL)
    others = [torch.randn(NUMEL) for _ in range(2)]
    low = torch.empty(NUMEL, dtype=torch.bfloat16)
    sums = seconds_of(lambda: native.sum_of_squares([values]))
    copies = seconds_of(lambda: native.scale_copy([low], [values], 0.5))
    reduced = seconds_of(lambda: native.reduce_chunks(values, others))
    return {
        "sgd": _optimizer(partial(SGD, momentum=0.9), torch.device("cpu")),
        "sum_of_squares": Speed("fp32, summed in fp64", 4 * NUMEL, sums, NUMEL),
        "scale_copy": Speed("fp32 to bf16", 6 * NUMEL, copies, NUMEL),
        "reduce_chunks": Speed("sum of 2 in fp32", 12 * NUMEL, reduced, NUMEL),
    }


def seconds_of(
    run: Callable[[], Any],
    synchronize: Callable[[], Any] = lambda: None,
    *,
    before: Callable[[], Any] = lambda: None,
    span: float | None = None,
) -> float:
    """Return the time of the fastest call within ``span`` seconds (None: ``SECONDS``). Excluded: the first call, which
    creates state and touches memory, and the calls of ``before`` ahead of each."""
    run()
    synchronize()
    best, calls, begin = float("inf"), 0, time.perf_counter()
    while calls < 3 or time.perf_counter() - begin < (SECONDS if span is None else span):
        before()
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        best = min(best, time.perf_counter() - start)
        calls += 1
    return best


def _optimizer(make: Callable[..., MultiTensorOptimizer], device: torch.device) -> Speed:
    param, grad = torch.randn(NUMEL, device=device), torch.randn(NUMEL, device=device)
    low = torch.empty(NUMEL, dtype=torch.bfloat16, device=device)
    optimizer = make([param], lr=1e-4)
    group = optimizer.param_groups[0]
    seconds = seconds_of(
        lambda: optimizer.multi_tensor_step(group, [param], [grad], low_precision=[low]),
        get_accelerator().synchronize if device.type != "cpu" else lambda: None,
    )
    moments = len(optimizer.state[param]) - 1  # excluding the step
    # reads the gradient, reads and writes the parameter and its moments, writes the copy
    return Speed("fp32 with a bf16 copy", NUMEL * (4 + 8 * (1 + moments) + 2), seconds, NUMEL)


def _flatten() -> Speed:
    tensors = list(torch.randn(NUMEL).split(NUMEL // 16))
    return Speed("flatten 16 tensors", 8 * NUMEL, seconds_of(lambda: flatten(tensors)), NUMEL)


def _files(folder: str) -> list[Speed]:
    handle = aio_handle(queue_depth=32, overlap_events=True)
    tensor = handle.new_cpu_locked_tensor(FILE_BYTES, torch.empty(0, dtype=torch.uint8)).fill_(1)
    descriptor, path = tempfile.mkstemp(prefix="ds_report_", dir=folder)
    os.close(descriptor)
    try:
        written = seconds_of(lambda: handle.sync_pwrite(tensor, path))
        read = seconds_of(lambda: handle.sync_pread(tensor, path))
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
    where = f"{handle.backend}, {folder}"
    return [Speed(f"write, {where}", FILE_BYTES, written), Speed(f"read, {where}", FILE_BYTES, read)]


def _shared_memory() -> list[Speed]:
    """Measure an all-reduce between two ranks, both in this process."""
    segment = shared_memory.create_segment(2)
    if segment is None:
        return []
    descriptor, token = segment
    made = [shared_memory.attach(os.getpid(), descriptor, token, rank, (0, 1)) for rank in range(2)]
    os.close(descriptor)
    channels = [channel for channel in made if channel is not None]
    try:
        if len(channels) < 2:
            return []
        for channel in channels:
            channel.start(timedelta(seconds=30), cores=len(available_cores()))
        tensors = [torch.ones(NUMEL) for _ in channels]
        ranks = [shared_memory.SharedMemoryTransport(channel) for channel in channels]
        seconds = seconds_of(lambda: _all_reduce(ranks, tensors))
    finally:
        for channel in channels:
            channel.close()
    return [Speed("all-reduce of two ranks, fp32", 4 * NUMEL, seconds, NUMEL)]


def _all_reduce(ranks: list[shared_memory.SharedMemoryTransport], tensors: list[Tensor]) -> None:
    for pending in [rank.all_reduce(tensor, scale=0.5) for rank, tensor in zip(ranks, tensors, strict=True)]:
        pending.wait()
