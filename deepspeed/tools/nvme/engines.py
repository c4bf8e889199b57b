"""The engines that `ds_io` can time: the same read or write done by a handle, a fast writer, or plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, cast

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.ops.aio.async_io import aio_handle
from deepspeed.ops.gds.gds import gds_handle
from deepspeed.ops.io import FastFileWriter, FastFileWriterConfig

HANDLES = ("aio_handle", "aio_basic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One configuration of reading or writing a whole file."""

    io_size: int  # bytes
    read: bool
    engine: str = "aio_handle"
    block_size: int = 1 << 20
    queue_depth: int = 32
    single_submit: bool = False
    overlap_events: bool = True
    intra_op_parallelism: int = 1
    fast_io_size: int = 64 << 20  # bytes buffered by torch_fastio
    device: int | None = None  # accelerator that holds the tensor; None: the host
    gds: bool = False
    pinned: bool = True
    legacy_save: bool = False
    validate: bool = False

    def handle(self) -> aio_handle:
        kind = gds_handle if self.gds else aio_handle
        parallelism = 1 if self.engine == "aio_basic" else self.intra_op_parallelism
        return kind(self.block_size, self.queue_depth, self.single_submit, self.overlap_events, parallelism)


def prepare(transfer: Transfer) -> Callable[[str], object]:
    """Return a function that does the transfer with the file at a given path. Tensors and threads are created in
    advance."""
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
