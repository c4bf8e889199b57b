"""Host memory for storage: aligned, present, locked where the system lets us."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator

_HUGE_PAGE = 2 << 20
_ADVICE = ("MADV_HUGEPAGE", "MADV_POPULATE_WRITE")


def is_pinned(tensor: Tensor) -> bool:
    """Whether a device can reach this host memory by itself (False where there is no such device)."""
    return tensor.device.type == "cpu" and get_accelerator().device_name() != "cpu" and tensor.is_pinned()


def host_buffer(nbytes: int) -> Tensor:
    """Bytes for transfers between host and device: pinned where there is a device."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=get_accelerator().device_name() == "cuda")


class LockedMemory:
    """The locked tensors that one handle has given out.

    With a GPU they are pinned by torch. Without one they are mapped by themselves: page-aligned, in huge pages if
    there are some (a request then has a few pieces instead of hundreds of pages), resident, and locked against
    swapping as far as the limit of the system (`ulimit -l`) goes.
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
    slack = _HUGE_PAGE if nbytes >= _HUGE_PAGE else 0
    pages = mmap.mmap(-1, nbytes + slack)
    whole = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping alive
    start = -whole.data_ptr() % slack if slack else 0
    for advice in _ADVICE:
        try:
            pages.madvise(getattr(mmap, advice))
        except (AttributeError, OSError):  # another system, or an older kernel
            pass
    memory = whole[start : start + nbytes]
    _lock(memory.data_ptr(), nbytes)
    return memory


def _lock(address: int, nbytes: int) -> None:
    """mlock(2); pages beyond the limit stay unlocked: requests hold on to theirs while they are under way."""
    try:
        ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    except (AttributeError, OSError, TypeError):  # not a POSIX system
        pass
