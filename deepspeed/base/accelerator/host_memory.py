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
    """Return the resident set size of this process."""
    try:
        with open(PROC_STATM, "rb") as file:  # called every second; ten times as fast as psutil
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
    """Meter of this process's peak resident set size since the last ``reset()``.

    Linux has a resettable high-water mark. Elsewhere, and in sandboxes that forbid the reset, the peak is the largest
    sampled size.
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
        """Return the current resident size, and update the peak."""
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
