"""Count the host memory page-locked by the accelerator's ``pin_memory``, to report when host memory runs out.

Page-locked memory is not swapped out, and the system limits it (``ulimit -l``).
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.base.logging import logger

_FIRST_NOTE = 32 << 30
"""Total in bytes that is logged first; then every doubling is."""


@dataclass
class PinnedTotal:
    """Bytes pinned since process start, freed ones included."""

    bytes: int = 0
    calls: int = 0
    next_note: int = _FIRST_NOTE

    def __str__(self) -> str:
        return f"{_amount(self.bytes)} of host memory pinned in {self.calls} allocations"


_total = PinnedTotal()


def track_pinned_memory(num_bytes: int) -> None:
    """Count an allocation of page-locked memory. Log the total at 32 GiB and whenever it has doubled."""
    _total.bytes += num_bytes
    _total.calls += 1
    logger.debug(f"pinned {_amount(num_bytes)}; total: {_total}")
    if _total.bytes >= _total.next_note:
        logger.info(str(_total))
        while _total.bytes >= _total.next_note:
            _total.next_note *= 2


def pinned_memory_summary(tag: str = "") -> None:
    """Log the total, prefixed with ``tag``."""
    logger.info(f"{tag}: {_total}" if tag else str(_total))


def _amount(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} bytes"
