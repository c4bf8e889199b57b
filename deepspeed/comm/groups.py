"""Create process groups, all with the job's timeout."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from deepspeed.base.constants import default_pg_timeout

# torch 2.13 renamed the flat forms and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def default_timeout() -> timedelta:
    """Return the timeout of new groups: the default group's, as set by `init_distributed(timeout=...)` or
    DEEPSPEED_TIMEOUT."""
    world = dist.group.WORLD
    return default_pg_timeout if world is None else timeout_of(world)


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout that a group was created with."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):  # no backend for the device, or a backend without a timeout
            continue
    return default_pg_timeout


def new_group(
    ranks: Sequence[int], *, timeout: timedelta | None = None, separate: bool = False
) -> ProcessGroup:
    """Create a group of these ranks with the job's timeout. Only its members call this, in the same order if groups
    overlap. For all ranks of the job, return the default group, unless a separate one is requested (``separate``)."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    if not separate and list(ranks) == list(range(dist.get_world_size())):
        return world
    with _unique_name(tuple(ranks), world):
        group = dist.new_group(
            ranks=list(ranks), timeout=timeout or default_timeout(), use_local_synchronization=True
        )
    assert isinstance(group, ProcessGroup), f"rank {dist.get_rank()} is not in {list(ranks)}"
    return group


class _GroupCounts:
    """Number of groups created here per set of ranks, since ``world`` became the default group."""

    world: ProcessGroup | None = None
    numbers: Counter[tuple[int, ...]] = Counter()
    lock = threading.Lock()


@contextmanager
def _unique_name(ranks: tuple[int, ...], world: ProcessGroup) -> Iterator[None]:
    """Make torch name the next group by its ranks and their number of groups.

    torch uses the number of all groups of this process. It differs between pipeline stages of which only one has
    experts, so that members of a later common group give it different names and hang.
    """
    with _GroupCounts.lock:
        if _GroupCounts.world is not world:
            _GroupCounts.world, _GroupCounts.numbers = world, Counter()
        _GroupCounts.numbers[ranks] += 1
        label = f"deepspeed {','.join(map(str, ranks))} number {_GroupCounts.numbers[ranks]}"
        name = hashlib.sha1(label.encode(), usedforsecurity=False).hexdigest()
        usual = distributed_c10d._hash_ranks_to_str
        distributed_c10d._hash_ranks_to_str = lambda asked: name if tuple(asked) == ranks else usual(asked)
        try:
            yield
        finally:
            distributed_c10d._hash_ranks_to_str = usual
