"""The op `gds`: transfers between files and GPU memory that pass by the host (GPUDirect Storage)."""

from __future__ import annotations

import ctypes
import functools
from typing import NoReturn

import torch

from deepspeed.ops.aio.handle import aio_handle


@functools.cache
def why_not() -> str:
    """Why GPUDirect Storage cannot be used here."""
    if not torch.cuda.is_available():
        return "gds_handle needs an NVIDIA GPU, and torch sees none."
    try:
        ctypes.CDLL("libcufile.so.0")
    except OSError:
        return "gds_handle needs cuFile (NVIDIA GPUDirect Storage), and libcufile.so.0 is not installed."
    return "gds_handle: transfers by cuFile are not implemented in this release."


def is_available() -> bool:
    """Whether `gds_handle` can be made."""
    return not why_not()


class gds_handle(aio_handle):  # documented name
    """The interface of `aio_handle` for CUDA tensors. Refused with NotImplementedError: `aio_handle` takes CUDA tensors
    too, by way of pinned memory on the host."""

    def __init__(
        self,
        block_size: int = 1048576,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        super().__init__(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise NotImplementedError(f"{why_not()} Use aio_handle, which takes CUDA tensors too.")

    new_pinned_device_tensor = _refuse
    free_pinned_device_tensor = _refuse
    pin_device_tensor = _refuse
    unpin_device_tensor = _refuse
