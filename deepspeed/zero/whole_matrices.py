"""Assemble whole matrices inside a sharded step, for optimizers that need them (Muon).

Each matrix has one owner rank, the one that holds most of it. One all-to-all sends its fragments there, the owner
computes, and a second one returns the result: 4 bytes per element each way in fp32. Since buckets spread the matrices
over the ranks, they also spread this work. Of a matrix that tensor parallelism splits, each rank of the split assembles
the global matrix and computes the whole result, for its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.base.sharded import full_shape
from deepspeed.checkpoint.placement import local_part
from deepspeed.comm.collectives import Communicator
from deepspeed.zero.layout import UNUSED, batches
from deepspeed.zero.placements import is_split_matrix, is_stack, whole_tensor
from deepspeed.zero.replica_groups import ReplicaGroups
from deepspeed.zero.states.store import StateStore

BATCH_NUMEL = 32 * 1024 * 1024
"""Elements per exchange; meanwhile they exist twice, at the sender and at the owner."""


class MatrixPart(NamedTuple):
    """Elements ``[start, stop)`` of a flat matrix, held by ``rank``."""

    rank: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Matrix:
    """Location of one matrix: its parts in order, and the owner rank that assembles it."""

    param: int
    shape: tuple[int, ...]
    parts: tuple[MatrixPart, ...]
    owner: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


MatrixFunction = Callable[[Tensor], Tensor]
PartFunction = Callable[[int, Tensor], Tensor]
"""Of a parameter's number and this rank's part of its matrix."""


class SplitMatrices:
    """Makes functions of global matrices ones of the tensor-parallel parts of ``params``."""

    def __init__(self, params: Sequence[Tensor], replica_groups: ReplicaGroups) -> None:
        self.params = params
        self.replica_groups = replica_groups
        self.split = {number for number, param in enumerate(params) if is_split_matrix(param)}

    def of_parts(self, function: MatrixFunction, group: dict[str, Any]) -> PartFunction:
        """Return the function that maps a part to this rank's part of ``function`` of the global matrix. It is
        collective over the ranks of a split. Heads (``num_heads``) are whole on each rank."""
        split = self.split if group.get("num_heads") is None else ()

        def of_part(number: int, part: Tensor) -> Tensor:
            if number not in split:
                return function(part)
            param = self.params[number]
            whole = whole_tensor(part.reshape(full_shape(param)), self.replica_groups, of=param)
            result = function(whole.view(len(whole), -1)).view(whole.shape)
            return local_part(param, result).reshape(part.shape)

        return of_part


class WholeMatrices:
    """Applies a function of whole matrices to values partitioned like the weights of ``store``."""

    def __init__(self, store: StateStore, replica_groups: ReplicaGroups) -> None:
        self.store = store
        self.splits = SplitMatrices(store.params, replica_groups)
        self.matrices: list[dict[Communicator, list[Matrix]]] = [{} for _ in store.optimizer.param_groups]
        for matrix in matrices_of(store):
            if store.group_of[matrix.param] < 0:
                continue
            holders = replica_groups.of(store.params[matrix.param]).shard
            if matrix.param in self.splits.split:  # one position in all replica groups, also for uneven parts
                matrix = replace(matrix, owner=matrix.param % holders.size)
            self.matrices[store.group_of[matrix.param]].setdefault(holders, []).append(matrix)

    def __call__(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        values: Sequence[Tensor],
        function: MatrixFunction,
    ) -> None:
        """Replace ``values[i]``, shaped like the fragment ``params[i]``, by its part of ``function(whole)``.

        All ranks participate in every matrix of the group; a missing one (a parameter that no rank used) is zero, and
        its result is discarded. Collective.
        """
        index = next(i for i, known in enumerate(self.store.optimizer.param_groups) if known is group)
        fragment_of = {id(owned.master): owned for owned in self.store.fragments}
        mine: dict[int, Tensor] = {}
        for param, value in zip(params, values, strict=True):
            mine[fragment_of[id(param)].param_index] = value.view(-1)
        of_part = self.splits.of_parts(function, group)
        for holders, matrices in self.matrices[index].items():
            for batch in batches(matrices, attrgetter("numel"), BATCH_NUMEL):
                self._exchange(holders, batch, mine, of_part)

    def _exchange(
        self,
        holders: Communicator,
        batch: Sequence[Matrix],
        mine: dict[int, Tensor],
        function: PartFunction,
    ) -> None:
        rank, size = holders.rank, holders.size
        held = [
            [(m, p) for m in batch if m.owner == r for p in m.parts if p.rank == rank] for r in range(size)
        ]
        due = [
            [(m, p) for m in batch if m.owner == rank for p in m.parts if p.rank == r] for r in range(size)
        ]
        sent = [sum(p.numel for _, p in runs) for runs in held]
        received = [sum(p.numel for _, p in runs) for runs in due]
        first = self.store.params[batch[0].param]
        dtype = torch.promote_types(first.dtype, torch.float32)
        outgoing = torch.zeros(sum(sent), dtype=dtype, device=first.device)
        for slot, (matrix, _) in _slots(held, outgoing):
            if matrix.param in mine:
                slot.copy_(mine[matrix.param])
        incoming = torch.empty(sum(received), dtype=dtype, device=first.device)
        holders.all_to_all(incoming, outgoing, received, sent).wait()
        self._compute(batch, due, incoming, function)
        holders.all_to_all(outgoing, incoming, sent, received).wait()
        for slot, (matrix, _) in _slots(held, outgoing):
            if matrix.param in mine:
                mine[matrix.param].copy_(slot)

    @staticmethod
    def _compute(
        batch: Sequence[Matrix],
        due: Sequence[Sequence[tuple[Matrix, MatrixPart]]],
        incoming: Tensor,
        function: PartFunction,
    ) -> None:
        """Assemble the parts in ``incoming`` and replace them with the parts of the result."""
        gathered: dict[int, list[tuple[Tensor, MatrixPart]]] = {}
        for slot, (matrix, part) in _slots(due, incoming):
            gathered.setdefault(matrix.param, []).append((slot, part))
        # In the order of the layout, not of what arrives: the ranks of a split may cut batches elsewhere, and meet in
        # each of its matrices.
        for matrix in batch:
            if (parts := gathered.get(matrix.param)) is None:
                continue
            whole = torch.empty(matrix.numel, dtype=incoming.dtype, device=incoming.device)
            for slot, part in parts:
                whole[part.start : part.stop] = slot
            result = function(matrix.param, whole.view(matrix.shape)).reshape(-1)
            for slot, part in parts:
                slot.copy_(result[part.start : part.stop])


class LocalMatrices:
    """Counterpart of ``WholeMatrices`` where ZeRO does not shard tensors."""

    def __init__(self, store: StateStore, replica_groups: ReplicaGroups) -> None:
        self.store = store
        self.splits = SplitMatrices(store.params, replica_groups)

    def __call__(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        values: Sequence[Tensor],
        function: MatrixFunction,
    ) -> None:
        numbers = {id(owned.master): owned.param_index for owned in self.store.fragments}
        of_part = self.splits.of_parts(function, group)
        for param, value in zip(params, values, strict=True):
            number = numbers[id(param)]
            matrix = value.view(matrix_shape(self.store.params[number]))
            value.copy_(of_part(number, matrix).view(value.shape))


def matrix_shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape in which an update sees a parameter: [rows, all others], or a stack [experts, rows, all
    others]. Vectors keep their shape."""
    shape = tuple(full_shape(param))
    kept = 2 if is_stack(param) else 1
    return shape if len(shape) <= kept else (*shape[:kept], math.prod(shape[kept:]))


def matrices_of(store: StateStore) -> Iterator[Matrix]:
    """Yield every non-empty parameter of the store's buckets with the ranks that hold its parts."""
    for bucket in store.param_buckets:
        layout = bucket.layout
        for slot, param in zip(layout.slots, bucket.params, strict=True):
            parts = [MatrixPart(*part) for part in layout.parts(slot)]
            if parts and slot.param != UNUSED:
                owner = max(parts, key=lambda part: (part.numel, -part.rank)).rank
                yield Matrix(slot.param, matrix_shape(param), tuple(parts), owner)


def _slots(
    runs: Sequence[Sequence[tuple[Matrix, MatrixPart]]], flat: Tensor
) -> Iterator[tuple[Tensor, tuple[Matrix, MatrixPart]]]:
    """Yield the view of ``flat`` that belongs to each part, in the order of the exchange."""
    position = 0
    for run in runs:
        for matrix, part in run:
            yield flat[position : position + part.numel], (matrix, part)
            position += part.numel
