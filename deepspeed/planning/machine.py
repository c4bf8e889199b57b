"""Memory capacity of the device, the host, and the disks of the swap folders."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.accelerator.host_memory import machine_available_bytes
from deepspeed.config.plan import Plan

if TYPE_CHECKING:
    from deepspeed.planning.ledger import MemoryPlace

_CGROUP = Path("/sys/fs/cgroup")
LIMIT = ("memory.max", "memory/memory.limit_in_bytes")
USE = ("memory.current", "memory/memory.usage_in_bytes")
"""Files of a container's memory limit and use."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes of each device, and of the host and the disks of one node; None if unknown."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None

    def of(self, place: MemoryPlace) -> int | None:
        return getattr(self, place.value)


def free_now(plan: Plan, device_type: str) -> Capacity:
    """Return the bytes that can be allocated now."""
    limit = _cgroup_number(*LIMIT)
    host = machine_available_bytes()
    if limit is not None:
        host = min(host, max(0, limit - (_cgroup_number(*USE) or 0)))
    return Capacity(_device(device_type, total=False), host, free_disk(plan.swap_folders))


def total_capacity(plan: Plan, device_type: str) -> Capacity:
    """Return the bytes that no run can exceed: the full device, the machine's memory plus swap space; for disks the
    free space."""
    return Capacity(_device(device_type, total=True), _host_total(), free_disk(plan.swap_folders))


@functools.cache
def _host_total() -> int:
    total = psutil.virtual_memory().total
    limit = _cgroup_number(*LIMIT)
    return (min(total, limit) if limit is not None else total) + psutil.swap_memory().total


def _cgroup_number(*names: str) -> int | None:
    """Read a number of this container's cgroup (v2, then v1); None if there is none."""
    for name in names:
        try:
            text = (_CGROUP / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def _device(device_type: str, *, total: bool) -> int | None:
    """Return the memory of this process's device; None if ranks compute in host memory, or there is no such device."""
    accelerator = get_accelerator()
    if device_type == "cpu" or accelerator.device_name() != device_type or not accelerator.is_available():
        return None
    try:
        return accelerator.total_memory() if total else accelerator.available_memory()
    except (RuntimeError, NotImplementedError):  # a driver without devices
        return None


def free_disk(folders: Iterable[Path]) -> int | None:
    """Return the free bytes on the file systems of ``folders``, which need not exist yet; None without folders."""
    free: dict[int, int] = {}
    for folder in folders:
        there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        free[os.stat(there).st_dev] = shutil.disk_usage(there).free
    return sum(free.values()) if free else None


def neighbours() -> int:
    """Return the number of ranks on this host according to the launcher's variables, else 1; too low a number only
    makes the check more lenient."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return 1
