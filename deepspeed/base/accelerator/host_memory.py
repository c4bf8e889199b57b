"""Memory of this process and of the machine, in bytes."""

from __future__ import annotations

import mmap
from pathlib import Path

import psutil

PROC_STATUS = Path("/proc/self/status")
PROC_STATM = "/proc/self/statm"
PROC_CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK_RSS = "5"  # proc(5), clear_refs


def resident_bytes() -> int:
    """Resident set size of this process."""
    try:
        with open(PROC_STATM, "rb") as file:  # a tenth of what psutil takes, and asked for every second
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):  # not Linux
        return psutil.Process().memory_info().rss


def machine_total_bytes() -> int:
    return psutil.virtual_memory().total


def machine_used_bytes() -> int:
    return psutil.virtual_memory().used


def machine_available_bytes() -> int:
    """Return the bytes that can be allocated without swapping."""
    return psutil.virtual_memory().available


class PeakMeter:
    """Peak resident size of this process since the last ``reset()``.

    Linux keeps a high-water mark that can be reset. Elsewhere, and in sandboxes that forbid the reset,
    the peak is the largest size seen when it was queried.
    """

    def __init__(self) -> None:
        self._largest_seen = 0
        self._kernel_mark_is_ours = True

    def reset(self) -> None:
        try:
            PROC_CLEAR_REFS.write_text(RESET_PEAK_RSS)
            self._kernel_mark_is_ours = True
        except OSError:
            self._kernel_mark_is_ours = False
        self._largest_seen = resident_bytes()

    def sample(self) -> int:
        """Current resident size, remembered if it is the largest so far."""
        current = resident_bytes()
        self._largest_seen = max(self._largest_seen, current)
        return current

    def peak(self) -> int:
        self.sample()
        return max(self._largest_seen, self._kernel_peak() if self._kernel_mark_is_ours else 0)

    @staticmethod
    def _kernel_peak() -> int:
        try:
            for line in PROC_STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        return 0
