"""Choose the columns of the weights that every step updates (ZenFlow): those with the largest gradients.

Columns are those of a weight [rows, columns]; one with more dimensions counts as [first, product of the others], and
vectors are updated whole in every step. A column's importance is the sum of its squared gradients, over all ranks
that have a part of it, so that the choice does not depend on how weights are partitioned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.base.sharded import full_shape
from deepspeed.comm.collectives import Communicator
from deepspeed.zero.replica_groups import ReplicaGroups
from deepspeed.zero.states.store import OwnedFragment, StateStore
from deepspeed.zero.update_context import params_by_group


def columns_of(shape: Sequence[int]) -> int:
    """Return the number of columns to choose from; 0: none, every step updates the whole weight."""
    if len(shape) < 2:
        return 0
    return math.prod(shape[1:])


@dataclass(frozen=True)
class ColumnChoice:
    """Chooses ``ratio`` of the columns of each weight of ``store``, at least one if it is positive."""

    store: StateStore
    replica_groups: ReplicaGroups
    ratio: float

    def always_chosen(self, owned: OwnedFragment) -> bool:
        """Return whether all elements of the fragment are always chosen."""
        return self.ratio >= 1.0 or columns_of(full_shape(self.store.params[owned.param_index])) == 0

    def column_indices(self, owned: OwnedFragment, device: torch.device) -> Tensor:
        """Return the column of each element of the fragment: [numel] int64."""
        columns = columns_of(full_shape(self.store.params[owned.param_index]))
        start = owned.fragment.param_offset
        return torch.arange(start, start + owned.fragment.numel, device=device).remainder_(columns)

    def choose(self, fragments: Sequence[OwnedFragment]) -> tuple[dict[int, Tensor], float]:
        """Choose by the current gradients of ``fragments``. Return the positions (int64) of the chosen elements by
        fragment id, and their share of the squared gradient norm. Collective."""
        device = self.store.params[0].device
        sums = [
            torch.zeros(columns_of(full_shape(p)), dtype=torch.float64, device=device)
            for p in self.store.params
        ]
        mine = [owned for owned in fragments if not self.always_chosen(owned)]
        for owned in mine:
            squares = owned.gradient().to(device).double().square_()
            sums[owned.param_index].index_add_(0, self.column_indices(owned, device), squares)
        for replica_group, indices in sorted(
            params_by_group(self.store.params, self.replica_groups).items(), key=lambda e: e[0].name
        ):
            self._add_up([sums[i] for i in indices], replica_group.shard)
        chosen: dict[int, Tensor] = {}
        masks = {owned.param_index: self._top_columns(sums[owned.param_index]) for owned in mine}
        for owned in mine:
            mask = masks[owned.param_index][self.column_indices(owned, device)]
            chosen[id(owned)] = mask.nonzero().view(-1)
        held = sum(float(sums[i][mask].sum()) for i, mask in masks.items())
        whole = sum(float(sums[i].sum()) for i in masks)
        return chosen, self.share(held, whole)

    def _top_columns(self, sums: Tensor) -> Tensor:
        mask = torch.zeros(len(sums), dtype=torch.bool, device=sums.device)
        if self.ratio > 0:
            number = min(len(sums), max(1, round(self.ratio * len(sums))))
            mask[sums.topk(number).indices] = True
        return mask

    def share(self, held: float, whole: float) -> float:
        """Return ``held / whole`` over all ranks, so that they decide alike; 1 if ``whole`` is 0. Collective."""
        both = torch.tensor([held, whole], dtype=torch.float64, device=self.store.params[0].device)
        for communicator in (self.replica_groups.all_ranks, *self.replica_groups.across.values()):
            if communicator.size > 1:
                communicator.all_reduce(both).wait()
        held, whole = both.tolist()
        return held / whole if whole > 0 else 1.0

    @staticmethod
    def _add_up(sums: list[Tensor], communicator: Communicator) -> None:
        if communicator.size == 1 or not any(one.numel() for one in sums):
            return
        flat = torch.cat(sums)
        communicator.all_reduce(flat).wait()
        for own, total in zip(sums, flat.split([one.numel() for one in sums]), strict=True):
            own.copy_(total)
