"""The model's own weights when parameters are sharded (stage 3)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import Tensor, nn

from deepspeed.checkpoint.placement import placement_of
from deepspeed.checkpoint.shards import ShardCut, ShardIndex


class ShardedWeights:
    """Live fragments of a module's partitioned parameters; a tied parameter appears once.

    Reads the attributes of a partitioned parameter: ``ds_shape``, ``ds_owner``, and its position ``ds_position`` in
    the owner.
    """

    def __init__(self, module: nn.Module) -> None:
        self.params: dict[str, Any] = {
            name: param for name, param in module.named_parameters() if hasattr(param, "ds_owner")
        }

    def __bool__(self) -> bool:
        return bool(self.params)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(param.ds_shape) for name, param in self.params.items()}

    def cuts(self) -> dict[str, ShardCut]:
        """Return the cut of each parameter over the ranks, by name."""
        return {name: param.ds_owner.cut_of(param.ds_position) for name, param in self.params.items()}

    def fragments(self, *, replicas: bool = True) -> Iterator[tuple[ShardIndex, Tensor]]:
        """Yield this rank's shard of each parameter, a 1-D view in its dtype. ``replicas=False``: only shards of
        which this rank is the first holder."""
        for name, param in self.params.items():
            owner, position, placement = param.ds_owner, param.ds_position, placement_of(param)
            if not replicas and not owner.first_replica:
                continue
            if not prod(param.ds_shape):
                yield placement.index(name), owner.local_part(position)
            for rank, start, stop in owner.owning_ranks(position):
                if rank == owner.rank:
                    yield placement.index(name, start, stop), owner.local_part(position)

    def changed(self) -> None:
        """Publish shards after a write on all ranks: refresh persistent parameters, evict gathered ones. Collective."""
        owners = {id(param.ds_owner): param.ds_owner for param in self.params.values()}
        for pending in [owner.publish() for owner in owners.values()]:
            if pending is not None:
                pending.wait()
        for owner in owners.values():
            owner.shards_written()
