"""The model's own weights where parameters are sharded over the ranks (stage 3)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import Tensor, nn

from deepspeed.checkpoint.shards import ShardIndex


class ShardedWeights:
    """Live fragments of a module's partitioned parameters; a tied parameter appears once.

    Reads the attributes that partitioning leaves on a parameter: ``ds_shape``, and ``ds_home`` with its position
    ``ds_position`` there.
    """

    def __init__(self, module: nn.Module) -> None:
        self.params: dict[str, Any] = {
            name: param for name, param in module.named_parameters() if hasattr(param, "ds_home")
        }

    def __bool__(self) -> bool:
        return bool(self.params)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(param.ds_shape) for name, param in self.params.items()}

    def fragments(self) -> Iterator[tuple[ShardIndex, Tensor]]:
        """This rank's part of each parameter, 1-D in its own dtype; writes go through."""
        for name, param in self.params.items():
            home, position = param.ds_home, param.ds_position
            if not prod(param.ds_shape):
                yield ShardIndex(name, tuple(param.ds_shape), (), 0, 0), home.local_part(position)
            for rank, start, stop in home.owners(position):
                if rank == home.rank:
                    yield ShardIndex(name, tuple(param.ds_shape), (), start, stop), home.local_part(position)

    def changed(self) -> None:
        """Parts were written on all ranks: refresh what is kept in full, discard what was gathered.
        Collective."""
        homes = {id(param.ds_home): param.ds_home for param in self.params.values()}
        for pending in [home.publish() for home in homes.values()]:
            if pending is not None:
                pending.wait()
        for home in homes.values():
            home.changed()
