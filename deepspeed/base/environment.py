"""Read the rank of this process from the environment variables of launchers and clouds.

All code that needs a rank before there is a process group uses this module: the config, `init_distributed`, the
logger, the memory plan. Readers with separate rules would eventually disagree, and a config that counts four ranks in
a job of one trains on a quarter of the batch.

Functions take the environment as a mapping: only `apply` writes it, and only `default_group` queries
torch.distributed, if loaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
ALONE = "alone"  # source of the identity without a launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Ranks and rendezvous address of this process. `master_addr` None: the address of rank 0 is unknown."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    source: str

    def apply(self, env: MutableMapping[str, str]) -> None:
        """Write the identity to the variables that torch.distributed and all other code read."""
        env["RANK"], env["WORLD_SIZE"] = str(self.rank), str(self.world_size)
        env["LOCAL_RANK"] = str(self.local_rank)
        if self.local_size is not None:
            env.setdefault("LOCAL_SIZE", str(self.local_size))
        if self.master_addr is not None:
            env["MASTER_ADDR"] = self.master_addr
        if self.master_port is not None:
            env["MASTER_PORT"] = str(self.master_port)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Environment variables in which one kind of launcher sets rank and world size."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# SLURM_STEP_NUM_TASKS exists only inside srun; SLURM_NTASKS also in a batch script, which is one process.
SLURM = Launcher(
    "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
)
MPI = (
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("MPI (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def discover(env: Mapping[str, str], default_port: int, *, schedulers: bool = True) -> Identity | None:
    """Return this process's identity, or None if nothing indicates a job.

    RANK and WORLD_SIZE take precedence; with `schedulers`, MPI launchers and Slurm come next. A cloud (AzureML) may
    add the address of rank 0. ValueError: a variable is missing or out of range.
    """
    launchers = (TORCHRUN, *MPI, SLURM) if schedulers else (TORCHRUN,)
    launcher = next((one for one in launchers if one.rank in env and one.size in env), None)
    if launcher is None:
        if "RANK" in env or "WORLD_SIZE" in env:
            missing = "WORLD_SIZE" if "RANK" in env else "RANK"
            raise ValueError(f"{missing} is not set: set both RANK and WORLD_SIZE, or neither")
        return None
    rank, world_size = _number(env, launcher.rank), _number(env, launcher.size)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{launcher.rank}={rank} with {launcher.size}={world_size}: the rank must be in [0, size)"
        )
    if launcher is SLURM:
        local_size = _first_task_count(env.get(SLURM.local_size, ""))
    else:
        local_size = _optional(env, launcher.local_size)
    if local_size is None and launcher is TORCHRUN:
        local_size = _optional(env, "LOCAL_SIZE")
    local_rank = _optional(env, launcher.local_rank)
    if local_rank is None:
        local_rank = rank % local_size if local_size else rank
    address, port = _master(env, launcher, world_size, local_size)
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        master_addr=address,
        master_port=port or default_port,
        source=launcher.name,
    )


def this_process(env: Mapping[str, str]) -> Identity:
    """Return the result of `discover`, or rank 0 of 1 if nothing indicates a job."""
    alone = Identity(rank=0, world_size=1, local_rank=_optional(env, "LOCAL_RANK") or 0, source=ALONE)
    return discover(env, 0) or alone


def default_group() -> tuple[int, int] | None:
    """Return (rank, size) of torch's default process group, None if there is none. Does not import torch, without
    which there is no group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def idle_slurm_tasks(env: Mapping[str, str]) -> int:
    """Return the number of tasks requested from Slurm if this process is not one of them, else 0: a batch script or
    an interactive shell runs once, whatever the allocation."""
    if discover(env, 0) is not None:
        return 0
    tasks = env.get("SLURM_NTASKS", "")
    return int(tasks) if tasks.isdigit() and int(tasks) > 1 else 0


def _master(
    env: Mapping[str, str], launcher: Launcher, world_size: int, local_size: int | None
) -> tuple[str | None, int | None]:
    port = _optional(env, "MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT={port}: the port must be in [1, 65535]")
    if address := env.get("MASTER_ADDR"):
        return address, port
    if world_size == 1 or local_size == world_size:
        return LOOPBACK, port
    if in_aml(env):
        node, _, node_port = env.get("AZ_BATCH_MASTER_NODE", "").partition(":")
        if node:
            return node, port or (int(node_port) if node_port.isdigit() else None)
        if node := env.get("AZ_BATCHAI_MPI_MASTER_NODE"):
            return node, port
    if launcher is SLURM:
        hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
        return first_host(hosts) or None, port
    return None, port


def _first_task_count(text: str) -> int | None:
    """Return the first count of tasks per node in Slurm's notation: "4(x2),3" -> 4."""
    match = re.match(r"\d+", text)
    return int(match.group()) if match else None


def first_host(nodelist: str) -> str:
    """Return the first name of a Slurm host list: "gpu[007-010,12],x1" -> "gpu007"."""
    match = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?([^,\[]*)", nodelist.strip())
    assert match is not None  # every part may be empty
    prefix, numbers, suffix = match.groups()
    first = re.split(r"[-,]", numbers)[0] if numbers else ""
    return f"{prefix}{first}{suffix}"


def in_aml(env: Mapping[str, str]) -> bool:
    """Return whether this is an Azure Machine Learning job."""
    return "AZUREML_EXPERIMENT_ID" in env


def in_aws_sm(env: Mapping[str, str]) -> bool:
    """Return whether this is an AWS SageMaker job."""
    return "SM_TRAINING_ENV" in env


def in_dlts(env: Mapping[str, str]) -> bool:
    """Return whether this is a DLTS (Azure DLWorkspace) job."""
    return "DLTS_JOB_ID" in env


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r}: expected an integer") from None


def _optional(env: Mapping[str, str], name: str) -> int | None:
    return _number(env, name) if env.get(name) else None
