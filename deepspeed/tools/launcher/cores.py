"""CPU cores of this machine and their assignment to its ranks."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.tools.launcher.errors import LaunchError
from deepspeed.tools.launcher.hostfile import parse_range_list

CPU_FOLDER = Path("/sys/devices/system/cpu")
NODE_FOLDER = Path("/sys/devices/system/node")
CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def numa_node_count() -> int:
    """Count the NUMA nodes of this machine: the default number of ranks on a CPU host."""
    return max(1, len(list(NODE_FOLDER.glob("node[0-9]*"))))


def usable_cores() -> list[int]:
    """Return one logical CPU per physical core that this process may run on, ascending."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    allowed = sorted(os.sched_getaffinity(0))
    first_of_core = {min(_siblings(cpu, allowed)) for cpu in allowed}
    return [cpu for cpu in allowed if cpu in first_of_core]


def _siblings(cpu: int, allowed: Sequence[int]) -> list[int]:
    """Return the allowed logical CPUs that share a physical core with ``cpu``, including itself."""
    try:
        listed = parse_range_list(
            (CPU_FOLDER / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        )
    except (OSError, ValueError):
        return [cpu]
    return [sibling for sibling in listed if sibling in allowed] or [cpu]


def core_budget() -> int:
    """Count the cores that this process may keep busy: the usable ones, or fewer under a cgroup quota."""
    cores = len(usable_cores())
    try:
        quota, period = CGROUP_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def divide(cores: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the cores of each rank: equal, contiguous runs; the remainder stays unused.

    Raises LaunchError if there are fewer cores than ranks.
    """
    share = len(cores) // ranks
    if share == 0:
        raise LaunchError(
            f"--bind_cores_to_rank: {ranks} ranks need at least {ranks} cores, but there are {len(cores)} "
            f"({', '.join(map(str, cores))}); start fewer ranks or leave the option out"
        )
    return [list(cores[rank * share : (rank + 1) * share]) for rank in range(ranks)]


def binding(core_list: str | None, ranks: int) -> list[list[int]]:
    """Return the cores of each rank under ``--bind_cores_to_rank``, from ``core_list`` or from all usable
    cores."""
    if not hasattr(os, "sched_setaffinity"):
        raise LaunchError(
            f"--bind_cores_to_rank: {sys.platform} cannot bind a process to cores; leave the option out"
        )
    if core_list is None:
        return divide(usable_cores(), ranks)
    cores = sorted(parse_range_list(core_list))
    missing = sorted(set(cores) - os.sched_getaffinity(0))
    if missing:
        raise LaunchError(f"--bind_core_list: core {missing[0]} is not available to this process")
    return divide(cores, ranks)
