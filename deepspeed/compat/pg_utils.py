"""Process groups of parallelism that may not be there: here ``None`` means one rank, not all of them."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup


def is_parallel(group: ProcessGroup | None) -> bool:
    """Whether ``group`` has more than one rank. None, without process groups too: no."""
    return group is not None and dist.get_world_size(group) > 1
