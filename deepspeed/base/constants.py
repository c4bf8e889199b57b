"""Process-wide constants that clients import (`deepspeed.base.constants`)."""

from __future__ import annotations

import os
from datetime import timedelta

# Default port of the rendezvous on rank 0's host.
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

# Environment variables that MPI-like launchers and AzureML set: rank and size across nodes.
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"

# Text in a collective's error by which the launcher recognises a rank that lost a peer. It is here because the
# launcher must not import deepspeed.comm, which reads the environment of the ranks.
RANK_ENDED = "Either a rank ended"

# Name of the abstract Unix socket at which each rank answers `ds stacks`, which must not import deepspeed.comm
# either.
RANK_SOCKET = "deepspeed.rank.{user}.{process}"

# Elastic training: the in-memory folder with the state of the ranks, which their launcher owns, so that it outlives
# them; and the file in it with the number of finished steps (8 bytes).
ELASTIC_STATE = "DEEPSPEED_ELASTIC_STATE"
ELASTIC_PROGRESS = "progress"

# Start time of the job in seconds since the epoch; set by the launcher.
JOB_STARTED = "DEEPSPEED_JOB_STARTED"

# File in the launcher's folder in which a rank that saves at SIGTERM states how many seconds that may take.
STOP_GRACE_FILE = "stop_grace"

# Exit code of ranks that saved their state shortly before the job's time limit, as of timeout(1).
TIME_IS_UP = 124

# Attribute that `tp_model_init` sets on a model: the tensor-parallel size.
TENSOR_PARALLEL_SIZE = "_ds_tp_model_init"


def __getattr__(name: str) -> timedelta:
    """Return `default_pg_timeout`, the timeout of collectives.

    It is read from the environment on access, so an invalid value stops the ranks that would wait, not the launcher.
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
