"""Documented helpers for swapping tensors to files with an aio handle (``deepspeed.ops.aio``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from deepspeed.base.logging import logger

MIN_AIO_BYTES = 1024**2
"""Smallest access that storage serves at its full speed."""
AIO_ALIGNED_BYTES = 1024
MIN_SWAPPABLE_BYTES = MIN_AIO_BYTES
"""Smaller tensors are not worth a file of their own."""


def swap_in_tensors(swap_handle: Any, tensor_buffers: Sequence[Tensor], swap_paths: Sequence[str]) -> None:
    """Start to read each file into its buffer; ``swap_handle.wait()`` completes it."""
    for buffer, path in zip(tensor_buffers, swap_paths, strict=True):
        if swap_handle.async_pread(buffer, path) != 0:
            raise OSError(f"cannot read {path}")


def swap_out_tensors(swap_handle: Any, tensor_buffers: Sequence[Tensor], swap_paths: Sequence[str]) -> None:
    """Start to write each buffer to its file; ``swap_handle.wait()`` completes it."""
    for buffer, path in zip(tensor_buffers, swap_paths, strict=True):
        if swap_handle.async_pwrite(buffer, path) != 0:
            raise OSError(f"cannot write {path}")


def print_object(obj: Any, name: str, exclude_list: Sequence[str] = ()) -> None:
    """Log the attributes of an object."""
    logger.info(f"{name}:")
    for attribute, value in sorted(vars(obj).items()):
        if attribute not in exclude_list:
            logger.info(f"  {attribute} {'.' * (29 - len(attribute))} {value}")


def get_sized_buffer(buffer: Tensor, num_elems: int) -> Tensor:
    """The first ``num_elems`` elements of a flat buffer."""
    if num_elems > buffer.numel():
        raise ValueError(f"num_elems={num_elems}, but the buffer has {buffer.numel()} elements")
    return buffer.narrow(0, 0, num_elems)


def get_sized_buffers(buffer_list: Sequence[Tensor], num_elems_list: Sequence[int]) -> list[Tensor]:
    return [get_sized_buffer(buffer, n) for buffer, n in zip(buffer_list, num_elems_list, strict=True)]
