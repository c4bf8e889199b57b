"""The op `async_io`, returned by `AsyncIOBuilder().load()`."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.ops.aio.handle import aio_handle

__all__ = ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]


def aio_read(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Read once, with a handle of its own (see `aio_handle`)."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write once, with a handle of its own (see `aio_handle`)."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(
        buffer, filename, validate
    )


def deepspeed_memcpy(dest: Tensor, src: Tensor) -> int:
    """Copy the bytes of one tensor to another of the same size; returns 0."""
    with torch.no_grad():
        dest.view(-1).view(torch.uint8).copy_(src.view(-1).view(torch.uint8))
    return 0
