"""Host memory for storage I/O: aligned, resident, locked if the system allows it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import time
import weakref

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.ops.huge_pages import HUGE_PAGE, search_deadline

# MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE of Linux
_HUGE_PAGES, _NO_HUGE_PAGES, _POPULATE = 14, 15, 23
_STEP = 8 << 20  # bytes made resident at a time


# Addresses of all live mappings, of any handle: memory belongs to the process.
_mappings: set[int] = set()


def is_locked(tensor: Tensor) -> bool:
    """Return whether the tensor, or its base, lies in a mapping of `LockedMemory`."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _mappings


def is_pinned(tensor: Tensor) -> bool:
    """Return whether a device can access this host memory directly; False without a device."""
    return tensor.device.type == "cpu" and get_accelerator().device_name() != "cpu" and tensor.is_pinned()


def host_buffer(nbytes: int) -> Tensor:
    """Allocate uint8 [nbytes] for transfers between host and device: pinned if there is a device."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=get_accelerator().device_name() == "cuda")


class LockedMemory:
    """The locked tensors that one handle has allocated.

    With a GPU they are pinned by torch. Without one they are mapped separately: aligned, resident, and locked against
    swapping as far as the system's limit (`ulimit -l`) allows. Huge pages are used if available: the cost of a request
    depends on the number of contiguous runs of its memory (measured on a virtual disk: reads of 1.2 GB/s into scattered
    4 KiB pages, 3.4 GB/s into 2 MiB pages; writes of 3.3 and 6.3 GB/s).
    """

    def __init__(self) -> None:
        self._given: dict[int, weakref.ref[Tensor]] = {}

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        if get_accelerator().device_name() == "cuda" or nbytes == 0:
            made = torch.empty(numel, dtype=dtype, pin_memory=nbytes > 0)
        else:
            made = _mapped(nbytes).view(dtype)
        self._given[made.data_ptr()] = weakref.ref(made)
        return made

    def free(self, tensor: Tensor) -> bool:
        """Release a tensor of `new`; the memory is freed with the last tensor that views it. False: not from `new`."""
        if not self.holds(tensor):
            return False
        del self._given[tensor.data_ptr()]
        return True

    def holds(self, tensor: Tensor) -> bool:
        reference = self._given.get(tensor.data_ptr())
        found = reference() if reference is not None else None
        return found is not None and tensor.device.type == "cpu"


def _mapped(nbytes: int) -> Tensor:
    # The rest after the last whole huge page is in small pages: no more memory than requested.
    huge = nbytes // HUGE_PAGE * HUGE_PAGE
    pages = _anonymous(nbytes + (HUGE_PAGE if huge else 0))
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    begin = -address % HUGE_PAGE if huge else 0
    if sys.platform.startswith("linux"):
        _make_present(pages, begin, begin + huge, begin + nbytes)
    _lock(address + begin, nbytes)
    _mappings.add(address + begin)
    weakref.finalize(pages, _mappings.discard, address + begin)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=begin)  # keeps the mapping alive


def _make_present(pages: mmap.mmap, begin: int, huge_end: int, end: int) -> None:
    """Make [begin, end) resident, up to `huge_end` in huge pages as long as the system, which may have to move other
    memory for them, finds them in reasonable time."""
    deadline = search_deadline(end - begin)
    at = begin
    while at < huge_end and time.monotonic() < deadline:
        step = min(_STEP, huge_end - at)
        _advise(pages, _HUGE_PAGES, at, step)
        _advise(pages, _POPULATE, at, step)
        at += step
    if at < end:
        _advise(pages, _NO_HUGE_PAGES, at, end - at)
        _advise(pages, _POPULATE, at, end - at)


def _anonymous(nbytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # Python's default, shared memory, has no huge pages
    return mmap.mmap(-1, nbytes, flags=flags)


def _advise(pages: mmap.mmap, advice: int, start: int, nbytes: int) -> None:
    with contextlib.suppress(OSError):  # an older kernel
        pages.madvise(advice, start, nbytes)


def _lock(address: int, nbytes: int) -> None:
    """Call mlock(2). Pages beyond the limit stay unlocked: requests pin theirs while in flight."""
    try:
        ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    except (AttributeError, OSError, TypeError):  # not a POSIX system
        pass
