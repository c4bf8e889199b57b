"""Store stage 3's shards (``offload_param``): on the device, in host memory, or in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from deepspeed.config.plan import ParamOffload
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket
from deepspeed.zero.offload.host_copies import has_own_memory, host_empty
from deepspeed.zero.offload.swap_file import SwapFile

KEY = "zero_optimization.offload_param.nvme_path"


class ParamStorage:
    """Stores shards according to the plan. With a folder, the first ``host_numel`` elements stay in host memory: a
    fixed choice, because a model is traversed cyclically, and an LRU cache would keep the wrong end of it.

    ``swap``: the swap file, or None. ``zero.Init`` with ``remote_device="nvme"`` builds models there, too.
    """

    def __init__(self, plan: ParamOffload | None) -> None:
        self.plan = plan
        self.swap = SwapFile(plan.folder, plan.storage, key=KEY) if plan is not None and plan.folder else None
        self.host_numel = 0

    @property
    def on_file(self) -> bool:
        """Return whether shards are stored in a file."""
        return self.swap is not None

    def store(self, part: Tensor) -> Tensor:
        """Return a copy of ``part`` [n] where it will be stored."""
        if self.plan is None:
            return part.clone()
        if self.swap is not None and self.plan.files(part.numel(), self.host_numel):
            return self.swap.put(part)
        if not has_own_memory(part.device):
            kept = part.clone()
        else:
            kept = host_empty(part.numel(), part.dtype, pin=self.plan.pin).copy_(part)
        self.host_numel += part.numel()
        return kept

    def read(self, buckets: Sequence[ShardedBucket], index: int, full: Tensor) -> Callable[[], None]:
        """Start to fill ``full`` [n] with the shard of one bucket; return a function that waits for it."""
        shard = buckets[index].shard
        assert shard is not None
        swap = self.swap
        if swap is None or not swap.holds(shard):
            full.copy_(shard)
            return lambda: None
        transfer = swap.read(full, shard)
        return lambda: swap.finish(transfer)

    def check(self) -> None:
        """Check the file before a shard is accessed other than by ``read``. OSError: it was truncated."""
        if self.swap is not None:
            self.swap.check()

    def close(self) -> None:
        if self.swap is not None:
            self.swap.close()
