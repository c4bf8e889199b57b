"""Bind ranks to cores and NUMA nodes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from deepspeed.base.exceptions import ExplainedError
from deepspeed.base.logging import logger

NODES = Path("/sys/devices/system/node")


def parse_range(rng: str) -> range:
    """Parse ``"4-7"`` or ``"4"`` into a range. ValueError: neither form."""
    match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", rng)
    if match is None:
        raise ValueError(f"Core list: {rng!r} is neither a number nor a range such as 0-7.")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        raise ValueError(f"Core list: the range {rng!r} ends before it starts.")
    return range(first, last + 1)


def parse_range_list(range_str: str) -> list[int]:
    """Parse ``"0-3,8,10-11"`` into ``[0, 1, 2, 3, 8, 10, 11]``. ValueError: ranges overlap or do not ascend."""
    cores: list[int] = []
    for part in range_str.split(","):
        numbers = parse_range(part)
        if cores and numbers.start <= cores[-1]:
            raise ValueError(f"Core list {range_str!r}: {part!r} overlaps or precedes the previous range.")
        cores.extend(numbers)
    return cores


def format_range_list(cores: Iterable[int]) -> str:
    """Format ``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _nodes() -> dict[int, list[int]]:
    """Return the cores of each NUMA node by number; empty for a memory-only node."""
    found: dict[int, list[int]] = {}
    for path in NODES.glob("node[0-9]*"):
        cores = (path / "cpulist").read_text().strip()
        found[int(path.name.removeprefix("node"))] = parse_range_list(cores) if cores else []
    return dict(sorted(found.items()))


def get_numa_cores() -> list[list[int]]:
    """Return the cores of each NUMA node that has some; empty if the system does not report them."""
    return [cores for cores in _nodes().values() if cores]


def available_cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))


def cpu_name() -> str:
    """Return the model name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores_of_rank(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> list[int]:
    """Return the local rank's even share of ``bind_core_list`` (None: all cores this process may use), in order."""
    cores = available_cores() if bind_core_list is None else parse_range_list(bind_core_list)
    share = len(cores) // num_local_procs
    if share < 1:
        raise ValueError(
            f"--bind_core_list: {num_local_procs} ranks do not fit on the {len(cores)} cores "
            f"{format_range_list(cores)!r}; list at least one core per rank, or start fewer ranks."
        )
    return cores[local_rank * share : (local_rank + 1) * share]


def check_for_numactl_pkg() -> bool:
    """Return whether ``numactl`` is installed, and log how to get it if not."""
    if shutil.which("numactl") is not None:
        return True
    logger.warning("The command numactl was not found: install the package of that name (apt, dnf, pacman).")
    return False


class NumactlError(ExplainedError, ValueError, RuntimeError):
    """``numactl`` is missing, or rejects the cores or the node. Scripts catch either base type."""


def get_numactl_cmd(
    bind_core_list: str | None, num_local_procs: int, local_rank: int
) -> tuple[int, list[str]]:
    """Return the number of cores per rank, and the command prefix that binds the local rank to its cores.

    Memory is bound too if the cores are within one NUMA node. Bindings that the system does not permit (a container
    without CAP_SYS_NICE) are left out with a warning: memory first, then the cores.

    Raises:
        NumactlError: ``numactl`` is not installed, or refuses the command for another reason.
        ValueError: the ranks do not fit on the cores, or ``KMP_AFFINITY`` is set.
    """
    if "KMP_AFFINITY" in os.environ:
        raise ValueError(
            f"KMP_AFFINITY={os.environ['KMP_AFFINITY']!r} conflicts with numactl, as it binds threads to "
            "cores itself: unset KMP_AFFINITY"
        )
    cores = cores_of_rank(bind_core_list, num_local_procs, local_rank)
    if not check_for_numactl_pkg():
        raise NumactlError(
            "the command numactl was not found: install the package of that name (apt, dnf, pacman)"
        )
    only_cores = ["-C", format_range_list(cores)]
    memory = _memory_options(cores)
    for options in dict.fromkeys((tuple(memory + only_cores), tuple(only_cores))):
        command = ["numactl", *options]
        refusal = _numactl_error(command)
        if refusal is None:
            return len(cores), command
        if not re.search("operation not permitted|permission denied", refusal, re.IGNORECASE):
            raise NumactlError(f"{' '.join(command)}: {refusal}")
        logger.warning(
            f"This system does not allow {' '.join(command)} ({refusal}): ranks are bound less tightly."
        )
    return len(cores), []


def _memory_options(cores: Iterable[int]) -> list[str]:
    """Return the options that bind memory to the node of these cores; none if they span several nodes."""
    nodes = _nodes()
    with_cores = [number for number, of_node in nodes.items() if of_node]
    without = [number for number, of_node in nodes.items() if not of_node]
    home = [number for number in with_cores if set(cores) <= set(nodes[number])]
    if not home:
        return []
    if len(without) == len(with_cores):
        # Each node's fast memory (HBM) is a separate node, which may run full: prefer it.
        return ["-p", str(without[with_cores.index(home[0])])]
    return ["-m", ",".join(map(str, home))]  # several: fake NUMA nodes share cores


def _numactl_error(command: Sequence[str]) -> str | None:
    """Return the error of ``command`` with a program that does nothing; None if it succeeds."""
    try:
        tried = subprocess.run(
            [*command, "true"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        return str(error)
    return None if tried.returncode == 0 else "; ".join(tried.stderr.strip().splitlines())
