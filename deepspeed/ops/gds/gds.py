"""The op `gds`: transfers between files and GPU memory that bypass the host (GPUDirect Storage)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.ops.aio.engine import AioEngine
from deepspeed.ops.aio.handle import PendingTransfer, aio_handle
from deepspeed.ops.gds import cufile


@functools.cache
def why_not() -> str:
    """Return the reason why GPUDirect Storage cannot be used here, "" if it can."""
    if not torch.cuda.is_available():
        return "gds_handle needs an NVIDIA GPU, and torch sees none."
    if cufile.library() is None:
        return f"gds_handle needs cuFile (NVIDIA GPUDirect Storage), and {cufile.NAME} is not installed."
    return ""


def is_available() -> bool:
    """Return whether `gds_handle` can be created."""
    return not why_not()


class gds_handle(aio_handle):  # documented name
    """An `aio_handle` for CUDA tensors, whose bytes bypass the host.

    Raises NotImplementedError without a GPU or cuFile, and OSError if cuFile does not start: `aio_handle` takes CUDA
    tensors too, through pinned host memory.
    """

    def __init__(
        self,
        block_size: int = 1048576,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        super().__init__(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        if why_not():
            raise NotImplementedError(f"{why_not()} Use aio_handle, which takes CUDA tensors too.")
        self._cufile: Any = cufile.library()
        self._registered: dict[int, int] = {}  # address -> bytes
        cufile.open_driver(self._cufile)

    # ---- memory --------------------------------------------------------------------------------------------

    def new_pinned_device_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Allocate a pinned 1-D tensor of the example's dtype on the current device."""
        device = get_accelerator().current_device_name()
        tensor = torch.empty(num_elem, dtype=example_tensor.dtype, device=device)
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: Tensor) -> bool:
        """Unpin a tensor; its memory is freed with its last view. False if it was not pinned by this handle."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: Tensor) -> bool:
        """Register the memory of a contiguous tensor; unpin it before that memory is freed."""
        _check_device(tensor)
        nbytes = tensor.nbytes
        if nbytes and tensor.data_ptr() not in self._registered:
            cufile.register(self._cufile, tensor.data_ptr(), nbytes)
            self._registered[tensor.data_ptr()] = nbytes
        return True

    def unpin_device_tensor(self, tensor: Tensor) -> bool:
        """Deregister a tensor's memory. False if it was not pinned by this handle."""
        if self._registered.pop(tensor.data_ptr(), None) is None:
            return False
        self._cufile.cuFileBufDeregister(tensor.data_ptr())
        return True

    def is_pinned(self, buffer: Tensor) -> bool:
        return buffer.data_ptr() in self._registered or super().is_pinned(buffer)

    # ---- transfers -----------------------------------------------------------------------------------------

    def _new_engine(self) -> AioEngine:
        return cufile.CuFileEngine(self._cufile, self._options)

    def _start(
        self, write: bool, buffer: Tensor, filename: str | int, offset: int, validate: bool
    ) -> PendingTransfer:
        _check_device(buffer)
        if buffer.device.type != "cuda":
            return super()._start(write, buffer, filename, offset, validate)
        with torch.cuda.device(buffer.device):
            return super()._start(write, buffer, filename, offset, validate)

    def _on_host(self, buffer: Tensor, copy: bool) -> Tensor:
        """Return the tensor itself, after pending work on it has completed."""
        get_accelerator().synchronize()
        return buffer


def _check_device(tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or not get_accelerator().on_accelerator(tensor):
        where = tensor.device if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"gds_handle needs tensors on the GPU, not on {where}: use aio_handle for those")
