"""Process groups created here, all with the job's timeout."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed.base.constants import default_pg_timeout

# torch 2.13 renamed the flat forms and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def default_timeout() -> timedelta:
    """The timeout that every group gets: that of the default group, as set by `init_distributed(timeout=...)` or
    DEEPSPEED_TIMEOUT."""
    world = dist.group.WORLD
    return default_pg_timeout if world is None else timeout_of(world)


def timeout_of(group: ProcessGroup) -> timedelta:
    """The timeout that a group was created with."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):  # no backend for the device, or a backend without a timeout
            continue
    return default_pg_timeout


def new_group(ranks: Sequence[int], *, timeout: timedelta | None = None) -> ProcessGroup:
    """A group of these ranks with the job's timeout. Only its members call this, in the same order if groups
    overlap. For all ranks of the job it is the default group itself."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    if list(ranks) == list(range(dist.get_world_size())):
        return world
    group = dist.new_group(
        ranks=list(ranks), timeout=timeout or default_timeout(), use_local_synchronization=True
    )
    assert isinstance(group, ProcessGroup), f"rank {dist.get_rank()} is not in {list(ranks)}"
    return group
