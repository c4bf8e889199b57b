"""Process groups made here, all with the job's timeout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

_DEFAULT_MINUTES = 10

_job_timeout: timedelta | None = None  # what init_distributed was given; every later group gets it too


def default_timeout() -> timedelta:
    """The timeout of every process group: the one given to `init_distributed`, else DEEPSPEED_TIMEOUT
    minutes (10)."""
    if _job_timeout is not None:
        return _job_timeout
    text = os.environ.get("DEEPSPEED_TIMEOUT", "")
    try:
        minutes = float(text) if text else _DEFAULT_MINUTES
    except ValueError:
        minutes = 0.0
    if minutes <= 0:
        raise ValueError(f"DEEPSPEED_TIMEOUT={text!r}: expected a positive number of minutes, such as 30")
    return timedelta(minutes=minutes)


def set_job_timeout(timeout: timedelta | None) -> None:
    """Remember the timeout of the default group (None: back to the environment's)."""
    global _job_timeout
    _job_timeout = timeout


def new_group(ranks: Sequence[int], *, timeout: timedelta | None = None) -> ProcessGroup:
    """A group of these ranks with the job's timeout. Only its members call this, in the same order where
    groups overlap. All ranks of the job: the default group itself."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    if list(ranks) == list(range(dist.get_world_size())):
        return world
    group = dist.new_group(
        ranks=list(ranks), timeout=timeout or default_timeout(), use_local_synchronization=True
    )
    assert isinstance(group, ProcessGroup), f"rank {dist.get_rank()} is not in {list(ranks)}"
    return group
