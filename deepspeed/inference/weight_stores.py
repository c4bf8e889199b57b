"""Stores for the weights of a model larger than its device: a file, or host memory.

A store allocates flat byte regions, and fills device buffers from them in the background.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.section import note
from deepspeed.config.sections.offload import OffloadDeviceEnum
from deepspeed.config.sections.zero import DeepSpeedZeroConfig
from deepspeed.ops.aio.engine import AioOptions
from deepspeed.zero.offload.host_copies import has_own_memory, host_empty
from deepspeed.zero.offload.swap_file import SwapFile


class FileStore:
    """An unlinked file in ``folder``, read past the page cache.

    Args:
        folder: ``offload_param.nvme_path``.
        device: device of the buffers; unless it is the host, reads are staged in host memory.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._file = SwapFile(
            folder.expanduser() / "deepspeed" / "inference",
            AioOptions(),
            key="zero.offload_param.nvme_path",
        )
        self._off_host = has_own_memory(device)
        self.readable = not self._off_host
        """Whether modules can compute with stored weights in place."""
        self._staging: dict[int, Tensor] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes read into buffers so far."""
        return self._file.bytes_read

    def region(self, nbytes: int) -> Tensor:
        """Allocate uint8 [nbytes] in the store, to be filled by plain copies."""
        return self._file.new(nbytes, torch.uint8)

    def start(self, buffer: Tensor, region: Tensor) -> Any:
        """Start filling the first bytes of ``buffer``; return a ticket for ``finish``."""
        target = self._on_host(buffer)[: region.numel()]
        return self._file.read(target, region), buffer

    def finish(self, ticket: Any) -> None:
        """Make later work of the current stream wait until the buffer is filled."""
        transfer, buffer = ticket
        self._file.finish(transfer)
        if self._off_host:
            buffer[: transfer.buffer.numel()].copy_(transfer.buffer)

    def close(self) -> None:
        self._file.close()

    def _on_host(self, buffer: Tensor) -> Tensor:
        if not self._off_host:
            return buffer
        found = self._staging.get(buffer.data_ptr())
        if found is None:
            found = self._staging[buffer.data_ptr()] = host_empty(buffer.numel(), torch.uint8, pin=True)
        return found


class HostStore:
    """Host memory, page-locked if ``pin``, copied to the device on a separate stream. Methods as of ``FileStore``."""

    readable = False

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self.bytes_read = 0
        self._pin = pin
        self._accelerator: Any = get_accelerator()
        self._stream = self._accelerator.Stream() if has_own_memory(device) else None

    def region(self, nbytes: int) -> Tensor:
        return host_empty(nbytes, torch.uint8, pin=self._pin)

    def start(self, buffer: Tensor, region: Tensor) -> Any:
        self.bytes_read += region.numel()
        target = buffer[: region.numel()]
        if self._stream is None:
            target.copy_(region)
            return None
        # Wait for kernels that use the buffer's previous content.
        self._stream.wait_stream(self._accelerator.current_stream())
        with self._accelerator.stream(self._stream):
            target.copy_(region, non_blocking=True)
            return self._stream.record_event()

    def finish(self, ticket: Any) -> None:
        if ticket is not None:
            self._accelerator.current_stream().wait_event(ticket)

    def close(self) -> None:
        """No-op: nothing is open."""


WeightStore = FileStore | HostStore


def make_store(zero: DeepSpeedZeroConfig, device: torch.device) -> WeightStore | None:
    """Make the store for the section ``zero`` of `init_inference`; None: weights stay where they are.

    DeepSpeedConfigError: stage 3 without ``offload_param``, or without the folder for files.
    """
    offload = zero.offload_param
    kind = OffloadDeviceEnum.none if offload is None else OffloadDeviceEnum(offload.device)
    if zero.stage < 3:
        if offload is not None or zero.stage:
            note(
                f"init_inference: zero.stage={zero.stage} has no effect: weights are kept outside the device by stage 3"
            )
        return None
    if offload is None or kind is OffloadDeviceEnum.none:
        raise DeepSpeedConfigError(
            "init_inference: zero.stage=3 needs offload_param.device cpu or nvme, to hold the weights; to "
            "split them over ranks use tensor_parallel.tp_size"
        )
    if kind is OffloadDeviceEnum.cpu:
        if not has_own_memory(device):
            note("init_inference: zero.offload_param.device=cpu has no effect: the device is the host")
            return None
        return HostStore(device, pin=offload.pin_memory)
    if offload.nvme_path is None:
        raise DeepSpeedConfigError(
            "init_inference: zero.offload_param.nvme_path is missing: set it to a folder on the storage"
        )
    return FileStore(offload.nvme_path, device)
