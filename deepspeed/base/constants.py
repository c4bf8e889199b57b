"""Process-wide constants that clients import (`deepspeed.base.constants`)."""

from __future__ import annotations

import os
from datetime import timedelta

# Port of the rendezvous on rank 0's host if nothing else specifies one.
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

# Environment variables that MPI-like launchers and AzureML set: rank and size across nodes.
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"

# Words in a collective's error by which the launcher recognises a rank that lost another one. They are here because
# the launcher imports nothing from deepspeed.comm, which would read the environment of the ranks.
RANK_ENDED = "Either a rank ended"

# Name of the abstract Unix socket at which each rank answers `ds stacks`, which imports as little.
RANK_SOCKET = "deepspeed.rank.{user}.{process}"

# Elastic training: the folder in memory in which ranks keep their state, which belongs to their launcher and outlives
# them; and the file in it with the number of finished steps (8 bytes).
ELASTIC_STATE = "DEEPSPEED_ELASTIC_STATE"
ELASTIC_PROGRESS = "progress"

# Seconds since the epoch at which a job began; its launcher sets it.
JOB_STARTED = "DEEPSPEED_JOB_STARTED"

# A rank that saves at SIGTERM says so, in the folder of its launcher: how many seconds that may take.
STOP_GRACE_FILE = "stop_grace"

# Exit code of ranks that have saved their state because the time limit of the job is near, as of timeout(1).
TIME_IS_UP = 124

# Attribute of a model that `tp_model_init` has seen: over how many ranks its layers are to be split.
TENSOR_PARALLEL_SIZE = "_ds_tp_model_init"


def __getattr__(name: str) -> timedelta:
    """`default_pg_timeout`: the longest a collective may take before its process group gives up.

    It is read from the environment on access, so a wrong value stops the processes that would wait, not the launcher.
    """
    if name == "default_pg_timeout":
        return _timeout(os.environ.get("DEEPSPEED_TIMEOUT", "10"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _timeout(minutes: str) -> timedelta:
    try:
        timeout = timedelta(minutes=float(minutes))
    except (ValueError, OverflowError):  # not a number; infinity, or more than a timedelta holds
        timeout = timedelta(0)
    if timeout < timedelta(milliseconds=1):  # the resolution of process groups
        raise ValueError(
            f"DEEPSPEED_TIMEOUT={minutes!r}: set it to a positive number of minutes, such as 30 or 0.5, or unset it "
            "for 10"
        )
    return timeout
