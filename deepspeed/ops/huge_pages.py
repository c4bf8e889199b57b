"""Collapse frequently read memory into huge pages, in place.

The TLB covers a few thousand pages: with pages of 4 KiB, some megabytes. Model weights are larger, so every decode step
misses the TLB for each of their pages, and hardware prefetch stops at page ends. Linux 6.1 and later collapse pages
into huge ones of 2 MiB on request (`MADV_COLLAPSE`), keeping addresses and contents.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25
_PATIENCE = 1.0  # seconds per request, and per 512 MiB of it


def search_deadline(nbytes: int) -> float:
    """Return when to stop requesting huge pages for ``nbytes`` bytes, on the monotonic clock: with little free memory,
    the system may have to move other pages for each."""
    return time.monotonic() + _PATIENCE * (1 + nbytes / (512 << 20))


def collapse(tensors: Iterable[Tensor]) -> int:
    """Collapse the memory of host tensors into huge pages, where they cover at least half of one. Takes about 0.5 to
    5 ms per page, once.

    Returns the bytes of huge pages in use: 0 on other systems, and fewer than requested if memory is a mapped file, or
    the system has no huge pages left or does not find them in time.
    """
    advise = _madvise()
    if advise is None:
        return 0
    pages = [page for page, covered in _covered_bytes(tensors).items() if 2 * covered >= HUGE_PAGE]
    deadline = search_deadline(len(pages) * HUGE_PAGE)
    in_time = itertools.takewhile(lambda _: time.monotonic() < deadline, pages)
    return sum(HUGE_PAGE for page in in_time if advise(page * HUGE_PAGE, HUGE_PAGE, _MADV_COLLAPSE) == 0)


def weights_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield all tensors that a forward of the module may read."""
    return itertools.chain(module.parameters(), module.buffers())


def _covered_bytes(tensors: Iterable[Tensor]) -> Counter[int]:
    """Count the bytes that contiguous tensors cover of each huge page, by page number."""
    covered: Counter[int] = Counter()
    spans = {(each.data_ptr(), each.nbytes) for each in tensors if _is_plain(each)}
    for begin, size in spans:
        for page in range(begin // HUGE_PAGE, -(-(begin + size) // HUGE_PAGE)):
            covered[page] += min(begin + size, (page + 1) * HUGE_PAGE) - max(begin, page * HUGE_PAGE)
    return covered


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor owns contiguous host memory, rather than wrapping other tensors."""
    wraps = hasattr(tensor, "__tensor_flatten__")
    return tensor.device.type == "cpu" and not wraps and tensor.is_contiguous()


def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
