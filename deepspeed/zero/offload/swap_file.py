"""Store tensors in a file, read when they are accessed, or in bulk through buffers.

[Note: at rest] A tensor of ``SwapFile.new`` is a shared mapping of its part of the file. Reads and writes go through
the page cache, whose memory the kernel reclaims at will, so code that touches state occasionally (checkpoints,
``safe_get_*``) needs no special case, except a call of ``check`` before. The optimizer step and the gathers, which
touch everything, bypass the page cache with ``read`` and ``write`` (io_uring and O_DIRECT where available). The
kernel keeps both views coherent: direct transfers first write back the cached pages of their range, and drop them
afterwards.

[Note: nothing is left over] The file is unlinked as soon as it is open. So its space is freed however the process
dies, and a restart cannot find an old file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import weakref
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.base.logging import log_dist
from deepspeed.ops.aio.engine import AioEngine, AioFailure, AioOptions, make_engine

PAGE = 4096
"""Every tensor starts at a multiple of this many bytes of the file: whole transfers need no bounce copy."""

GROW_BYTES = 64 << 20
"""The file grows in steps of at least this much."""


_TRIM_BYTES = 1 << 20


def _trim() -> None:
    """Return freed memory to the system. glibc keeps blocks below 32 MB, which, fragmented by the small objects of a
    model under construction, would add up to the model's size."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


class SwapTransfer(NamedTuple):
    """A read or write in flight; ``buffer`` must live until it has finished."""

    ticket: int
    buffer: Tensor
    write: bool
    offset: int


class SwapFile:
    """Swap file of one rank, in ``folder``, that grows as tensors are created.

    Args:
        folder: ``NVME_PATH/deepspeed/KIND``, which is created if the parent of ``NVME_PATH`` exists.
        options: settings of ``read`` and ``write`` (the config's ``aio`` section).
        key: the config key that named the folder, for messages.

    Raises:
        FileNotFoundError: the parent of ``NVME_PATH`` does not exist.
        OSError: the folder cannot be used or the disk is full; names what failed, the folder and the key.
    """

    def __init__(self, folder: Path, options: AioOptions, *, key: str) -> None:
        self.folder = folder
        self.key = key
        self.size = 0  # bytes allocated to tensors
        self.bytes_read = 0
        self._grown = 0
        self._mapping: Callable[[], mmap.mmap | None] = lambda: None  # the latest one, while a tensor uses it
        self._mapped_from = 0
        root = folder.parents[1]  # the user's folder; we add "deepspeed" and the kind
        self._maps: list[tuple[int, int, int]] = []
        """Address, bytes, offset in the file; sorted by address, disjoint."""
        if not root.parent.exists():
            raise FileNotFoundError(
                errno.ENOENT,
                f"{key}={str(root)!r}: the folder and its parent do not exist; mount the storage there, or create the "
                "folder (it is not created automatically: without the mount it would be on the system disk)",
                str(root),
            )
        if not root.exists():
            free = shutil.disk_usage(root.parent).free / 2**30
            log_dist(
                f"{key}={str(root)!r}: created the folder, with {free:.0f} GiB free. If a disk should have "
                "been mounted there, stop now",
                ranks=[0],
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd, name = tempfile.mkstemp(prefix="deepspeed_swap_", dir=folder)
            os.unlink(name)
        except OSError as error:
            raise self._error(error.errno or errno.EIO, "cannot be used for swap files") from None
        self._path = f"/proc/self/fd/{self._fd}"
        self._engine: AioEngine = make_engine(options)
        self.close = weakref.finalize(self, _close, self._engine, self._fd)

    def _error(self, code: int, what: str) -> OSError:
        return OSError(
            code,
            f"{self.key}: {self.folder} {what} ({os.strerror(code)}); choose another folder",
            str(self.folder),
        )

    def check(self) -> None:
        """Check the file before tensors at rest are accessed: reading a mapping beyond the end of its file kills the
        process (SIGBUS). OSError: the file was truncated from outside. It has no name, so only a damaged file system
        or a process that opens our descriptors (``/proc``) can do that."""
        if not self.close.alive:
            return
        size = os.fstat(self._fd).st_size
        if size < self._grown:
            raise OSError(
                errno.EIO,
                f"{self.key}: the swap file in {self.folder} was truncated from outside, to {size} of "
                f"{self._grown} bytes: its contents are lost. Load the last checkpoint in a new process, "
                "and make sure that nothing else touches that folder and its disk",
                str(self.folder),
            )

    # Tensors at rest ----------------------------------------------------------------------------------------

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [numel] in the file (Note: at rest). The disk space is allocated immediately."""
        nbytes = -(-max(1, numel * dtype.itemsize) // PAGE) * PAGE
        offset = self.size
        self._reserve(offset + nbytes)
        self.size += nbytes
        mapping = self._mapping()
        if mapping is None or self.size > self._mapped_from + len(mapping):
            # One mapping for all allocated space, as each holds a file descriptor.
            mapping = mmap.mmap(self._fd, self._grown - offset, flags=mmap.MAP_SHARED, offset=offset)
            self._mapping, self._mapped_from = weakref.ref(mapping), offset
        raw = torch.frombuffer(  # keeps the mapping alive
            mapping, dtype=torch.uint8, count=nbytes, offset=offset - self._mapped_from
        )
        self._remember(raw.data_ptr(), nbytes, offset)
        return raw.view(dtype)[:numel]

    def put(self, tensor: Tensor) -> Tensor:
        """Return a 1-D copy of ``tensor`` [any shape] in the file; the write bypasses the page cache."""
        if not tensor.numel():
            return tensor.detach().reshape(-1).clone()
        resting = self.new(tensor.numel(), tensor.dtype)
        host = tensor.detach().reshape(-1).cpu()
        self.finish(self.write(host, resting))
        if host.numel() * host.element_size() >= _TRIM_BYTES:
            _trim()
        return resting

    def _reserve(self, end: int) -> None:
        if end <= self._grown:
            return
        self.check()  # growing it would hide a truncation
        grow = max(end - self._grown, GROW_BYTES)
        try:
            os.posix_fallocate(self._fd, self._grown, grow)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._error(error.errno or errno.EIO, "cannot be used for swap files") from None
            try:  # the growth increment did not fit, but the needed size may
                grow = end - self._grown
                os.posix_fallocate(self._fd, self._grown, grow)
            except OSError as full:
                raise self._error(
                    full.errno or errno.ENOSPC,
                    f"has no room for {end / 2**30:.2f} GiB of swapped tensors of this rank",
                ) from None
        self._grown += grow

    def _remember(self, start: int, nbytes: int, offset: int) -> None:
        """Record a mapping. Older entries for these addresses belong to freed tensors, as addresses are reused."""
        low, high = bisect_left(self._maps, (start,)), bisect_left(self._maps, (start + nbytes,))
        if low and sum(self._maps[low - 1][:2]) > start:
            low -= 1
        self._maps[low:high] = [(start, nbytes, offset)]

    def _find(self, address: int) -> int | None:
        """Return the file offset of a mapped address, None for any other."""
        at = bisect_left(self._maps, (address + 1,)) - 1
        if at < 0:
            return None
        start, nbytes, offset = self._maps[at]
        return offset + address - start if address < start + nbytes else None

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor is stored in this file."""
        return self._find(tensor.data_ptr()) is not None

    def offset_of(self, resting: Tensor) -> int:
        """Return the file offset in bytes of a tensor from ``new`` or a view of one."""
        offset = self._find(resting.data_ptr())
        if offset is None:
            raise KeyError("this tensor is not in the swap file")
        return offset

    # Transfers ----------------------------------------------------------------------------------------------

    def read(self, buffer: Tensor, resting: Tensor) -> SwapTransfer:
        """Start to fill ``buffer`` [n] with the first n elements of ``resting``."""
        return self._start(False, buffer, resting)

    def write(self, buffer: Tensor, resting: Tensor) -> SwapTransfer:
        """Start to store ``buffer`` [n] as the first n elements of ``resting``."""
        return self._start(True, buffer, resting)

    def _start(self, write: bool, buffer: Tensor, resting: Tensor) -> SwapTransfer:
        self.check()
        nbytes = buffer.numel() * buffer.element_size()
        offset = self.offset_of(resting)
        try:
            ticket = self._engine.start(write, buffer.data_ptr(), nbytes, self._path, offset)
        except AioFailure as failure:
            raise self._failed(failure, write) from None
        if not write:
            self.bytes_read += nbytes
        return SwapTransfer(ticket, buffer, write, offset)

    def finish(self, transfer: SwapTransfer) -> None:
        try:
            self._engine.finish(transfer.ticket)
        except AioFailure as failure:
            raise self._failed(failure, transfer.write) from None

    def _failed(self, failure: AioFailure, write: bool) -> OSError:
        action = "writing" if write else "reading"
        error = OSError(
            failure.errno,
            f"{os.strerror(failure.errno)} while {action} the swap file in {self.folder} ({self.key}) at byte "
            f"{failure.offset}",
            str(self.folder),
        )
        error.offset = failure.offset  # type: ignore[attr-defined]
        return error


def _close(engine: AioEngine, descriptor: int) -> None:
    """End the transfers and the threads; stored tensors stay readable while they are referenced."""
    engine.close()
    os.close(descriptor)
