"""The model's own weights where parameters are sharded over the ranks (stage 3)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import Tensor, nn

from deepspeed.checkpoint.placement import placement_of
from deepspeed.checkpoint.shards import ShardCut, ShardIndex


class ShardedWeights:
    """Live fragments of a module's partitioned parameters; a tied parameter appears once.

    Reads the attributes that partitioning leaves on a parameter: ``ds_shape``, and ``ds_owner`` with its position
    ``ds_position`` there.
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
        """Return how each parameter is divided among the ranks, by name."""
        return {name: param.ds_owner.cut_of(param.ds_position) for name, param in self.params.items()}

    def fragments(self, *, replicas: bool = True) -> Iterator[tuple[ShardIndex, Tensor]]:
        """This rank's part of each parameter, 1-D in its own dtype; writes go through. ``replicas=False``: if it is the
        first of the ranks that hold the same part."""
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
        """Parts were written on all ranks: refresh what is kept in full, discard what was gathered.
        Collective."""
        owners = {id(param.ds_owner): param.ds_owner for param in self.params.values()}
        for pending in [owner.publish() for owner in owners.values()]:
            if pending is not None:
                pending.wait()
        for owner in owners.values():
            owner.changed()
