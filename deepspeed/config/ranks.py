"""The number of ranks of the job that a config is read for, and the rank of this process."""

from __future__ import annotations

import os

from deepspeed.base.environment import ALONE, Identity, default_group, this_process
from deepspeed.config.problems import DeepSpeedConfigError, Problem

NO_LAUNCHER = "no launcher and no process group found"


def global_rank() -> int:
    """Return this process's rank: in the default process group, else by the launcher's environment, else 0."""
    group = default_group()
    return _identity().rank if group is None else group[0]


def world_size() -> tuple[int, str]:
    """Return the number of ranks of the job and where it comes from; a process group need not exist yet."""
    group = default_group()
    if group is not None:
        return group[1], "from torch.distributed"
    identity = _identity()
    if identity.source == ALONE:
        return 1, NO_LAUNCHER
    return identity.world_size, "from the launcher's environment"


def _identity() -> Identity:
    """Read what `init_distributed` will read, and in the same way."""
    try:
        return this_process(os.environ)
    except ValueError as error:
        text = f"the ranks of the job are unknown: {error}"
        raise DeepSpeedConfigError(text, problems=[Problem("world size", str(error))]) from None
