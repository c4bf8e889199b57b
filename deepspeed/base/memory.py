"""Report memory in use as human-readable text."""

from __future__ import annotations

import sys

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.accelerator.host_memory import machine_total_bytes, machine_used_bytes
from deepspeed.base.logging import is_rank_zero, write_safely

GIB = 1024**3


def memory_usage() -> str:
    """Return one line with allocated and reserved memory of this rank's device, and their peaks."""
    accelerator = get_accelerator()
    figures = {
        "mem_allocated": accelerator.memory_allocated(),
        "max_mem_allocated": accelerator.max_memory_allocated(),
        "cache_allocated": accelerator.memory_reserved(),
        "max_cache_allocated": accelerator.max_memory_reserved(),
    }
    return "".join(f" | {name}: {size / GIB:.4f} GB" for name, size in figures.items())


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print device and host memory on rank 0 under the title ``message``, then reset the peaks. A no-op without
    ``force``, so that calls can stay in a script."""
    if not force or not is_rank_zero():
        return
    accelerator = get_accelerator()
    used, total = machine_used_bytes(), machine_total_bytes()
    write_safely(
        f"{message}\n"
        f"MA {accelerator.memory_allocated() / GIB:.2f} GB "
        f"Max_MA {accelerator.max_memory_allocated() / GIB:.2f} GB "
        f"CA {accelerator.memory_reserved() / GIB:.2f} GB "
        f"Max_CA {accelerator.max_memory_reserved() / GIB:.2f} GB\n"
        f"CPU Virtual Memory: used = {used / GIB:.2f} GB, percent = {100 * used / total:.1f}%\n",
        sys.stdout,
    )
    accelerator.reset_peak_memory_stats()
