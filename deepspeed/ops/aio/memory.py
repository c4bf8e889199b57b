"""Host memory for storage: aligned, present, locked where the system lets us."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator

_NO_HUGE_PAGES, _POPULATE = 15, 23  # MADV_NOHUGEPAGE, MADV_POPULATE_WRITE of Linux


def is_pinned(tensor: Tensor) -> bool:
    """Whether a device can reach this host memory by itself (False where there is no such device)."""
    return tensor.device.type == "cpu" and get_accelerator().device_name() != "cpu" and tensor.is_pinned()


def host_buffer(nbytes: int) -> Tensor:
    """Bytes for transfers between host and device: pinned where there is a device."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=get_accelerator().device_name() == "cuda")


class LockedMemory:
    """The locked tensors that one handle has given out.

    With a GPU they are pinned by torch. Without one they are mapped by themselves: page-aligned, resident, and locked
    against swapping as far as the limit of the system (`ulimit -l`) goes. In ordinary pages: a virtual disk reads
    into huge ones at three quarters of the speed.
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
        """Forgets a tensor of `new`; its memory goes when the last tensor on it does. False for any other."""
        if not self.holds(tensor):
            return False
        del self._given[tensor.data_ptr()]
        return True

    def holds(self, tensor: Tensor) -> bool:
        reference = self._given.get(tensor.data_ptr())
        found = reference() if reference is not None else None
        return found is not None and tensor.device.type == "cpu"


def _mapped(nbytes: int) -> Tensor:
    pages = mmap.mmap(-1, nbytes)
    if sys.platform.startswith("linux"):
        for advice in (_NO_HUGE_PAGES, _POPULATE):
            with contextlib.suppress(OSError):  # an older kernel
                pages.madvise(advice)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping alive
    _lock(memory.data_ptr(), nbytes)
    return memory


def _lock(address: int, nbytes: int) -> None:
    """mlock(2); pages beyond the limit stay unlocked: requests hold on to theirs while they are under way."""
    try:
        ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    except (AttributeError, OSError, TypeError):  # not a POSIX system
        pass
