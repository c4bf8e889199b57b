"""Engine services for an optimizer's update, as the optimizer protocol defines them (``deepspeed/ops/update.py``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.placement import placement_of
from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.ops.native import sum_of_squares
from deepspeed.ops.update import UpdateContext, refresh_weights
from deepspeed.zero.placements import is_partial, is_stack, own_views
from deepspeed.zero.replica_groups import ReplicaGroup, ReplicaGroups
from deepspeed.zero.states.store import GroupTensors, StateStore


class UpdateContextBuilder:
    """Makes the ``UpdateContext`` of each step. ``sharded``: whether the fragments of ``store`` are parts of
    parameters."""

    def __init__(self, store: StateStore, replica_groups: ReplicaGroups, *, sharded: bool) -> None:
        self.store = store
        self.replica_groups = replica_groups
        self.sharded = sharded
        self.rebuild()

    def rebuild(self) -> None:
        """Rebuild the services for the parameters that the store holds now."""
        traits, sharded = self.store.traits, self.sharded
        self.copies = ""
        """Which ranks compute one batch and hold copies of this rank's weights."""
        if traits.own_communication:
            self.copies = self.replica_groups.copies_of_one_batch(self.store.params, sharded=sharded)
        if self.copies and traits.local_weights:
            raise DeepSpeedConfigError(
                f"optimizer.type {type(self.store.optimizer).__name__!r} trains every copy of a parameter alone "
                f"between exchanges, and {self.copies}. Use AdamW, a 1-bit optimizer, or another layout"
            )
        split = sharded or any(map(is_partial, self.store.params))
        self._sums = None
        if (traits.segment_sums or traits.own_communication) and split:
            self._sums = SegmentSums(self.store, self.replica_groups, sharded=sharded)
        self._matrices = None
        if traits.whole_matrices and (split or any(map(is_stack, self.store.params))):
            from deepspeed.zero.whole_matrices import LocalMatrices, WholeMatrices  # for Muon

            make = WholeMatrices if sharded else LocalMatrices
            self._matrices = make(self.store, self.replica_groups)

        self._holders = (
            HolderGroups(self.store, self.replica_groups, sharded=sharded)
            if traits.own_communication
            else None
        )

    def context(self, gradient_norm: float, *, local_gradients: bool, copies: bool) -> UpdateContext:
        """Return the context of one update. ``gradient_norm``: after clipping. ``local_gradients``: gradients have not
        been summed over ranks. ``copies``: of any stage."""
        return UpdateContext(
            gradient_norm=gradient_norm,
            segment_sum=self._sums,
            segment_largest=self._sums and self._sums.largest,
            copy_sum=self._sums and self._sums.total,
            whole_matrices=self._matrices,
            holders=self._holders if local_gradients else None,
            parts=self.replica_groups.dense.shard
            if self.sharded and self.store.traits.own_communication
            else None,
            copies_of_one_batch=copies,
        )


class SegmentSums:
    """Reduces per-fragment numbers of ``store`` to whole parameters, for LAMB: over the ranks with its shards, and
    over those with other parts of the global tensor."""

    def __init__(self, store: StateStore, replica_groups: ReplicaGroups, *, sharded: bool) -> None:
        self.store = store
        self.members: dict[Communicator, list[int]] = {}
        self.shard = replica_groups.dense.shard if sharded else None
        if sharded:
            by_group = params_by_group(store.params, replica_groups)
            for replica_group, params in by_group.items():  # several may share one ``shard``
                self.members.setdefault(replica_group.shard, []).extend(params)
        for index, param in enumerate(store.params):
            for others in replica_groups.parts_of(param) if is_partial(param) else ():
                self.members.setdefault(others, []).append(index)
        if store.traits.segment_sums:  # others sum for means alone
            self._check_copies()

    def _check_copies(self) -> None:
        """Raise DeepSpeedConfigError if tensor-parallel ranks hold some elements twice, which sums would count twice.
        Collective."""
        params = self.store.params
        twice = torch.tensor([bool(placement_of(param).elsewhere) for param in params], dtype=torch.float32)
        twice = twice.to(params[0].device)
        for holders in self.members:
            holders.all_reduce_max(twice).wait()
        if twice.any():
            shape = placement_of(params[int(twice.nonzero()[0])]).global_shape
            raise DeepSpeedConfigError(
                "LAMB sums over whole weights, but tensor-parallel ranks hold some rows of a weight "
                f"{shape} twice (key-value heads that several ranks need): use at most as many "
                "tensor-parallel ranks as key-value heads, or another optimizer"
            )

    def __call__(self, masters: list[Tensor], sums: Tensor) -> Tensor:
        """Return ``sums`` [n, k] fp64 of fragments, each summed over its whole parameter. Collective."""
        indices = self._indices(masters)
        whole = torch.zeros(len(self.store.params), sums.shape[1], dtype=torch.float64)
        whole.index_add_(0, indices, sums.cpu())
        return self._joined(whole, indices, Communicator.all_reduce).to(sums.device)

    def largest(self, masters: list[Tensor], values: Tensor) -> Tensor:
        """Return ``values`` [n, k] fp64 >= 0 of fragments, each replaced by the maximum over its whole parameter.
        Collective."""
        indices = self._indices(masters)
        whole = torch.zeros(len(self.store.params), values.shape[1], dtype=torch.float64)
        whole.scatter_reduce_(0, indices.view(-1, 1).expand(values.shape), values.cpu(), "amax")
        return self._joined(whole, indices, Communicator.all_reduce_max).to(values.device)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` [k] fp64 over the ranks that share one copy. Collective."""
        total = values.to(self.store.params[0].device, copy=True)
        if self.shard is not None:
            self.shard.all_reduce(total).wait()
        return total.to(values.device)

    def _indices(self, masters: Sequence[Tensor]) -> Tensor:
        """Return the parameter indices [n] of these fragments."""
        index_of = {id(owned.master): owned.param_index for owned in self.store.fragments}
        return torch.tensor([index_of[id(master)] for master in masters], dtype=torch.int64)

    def _joined(
        self, whole: Tensor, indices: Tensor, collective: Callable[[Communicator, Tensor], Pending]
    ) -> Tensor:
        """Reduce each row of ``whole`` [params, k] over the ranks that have parts of its parameter; return the rows
        of ``indices``."""
        whole = whole.to(self.store.params[0].device)
        for holders, params in self.members.items():
            share = whole[params]
            collective(holders, share.view(-1)).wait()
            whole[params] = share
        return whole[indices.to(whole.device)]


class HolderGroups:
    """Groups masters by the ranks that hold the same ones: all ranks with these weights, or, if ``sharded``, the
    ranks with the same shard. Parts of tensors and copies of whole ones are separate kinds (Note: blocks and copies
    in `zero/partitioning.py`)."""

    def __init__(self, store: StateStore, replica_groups: ReplicaGroups, *, sharded: bool) -> None:
        self.sharded = sharded
        self.order = list(params_by_group(store.params, replica_groups))
        self.kind_of = {
            id(o.master): (replica_groups.of(param), is_partial(param))
            for o in store.fragments
            for param in (store.params[o.param_index],)
        }

    def __call__(self, masters: Sequence[Tensor]) -> list[tuple[Communicator, list[int]]]:
        found: dict[tuple[ReplicaGroup, bool], list[int]] = {
            (replica_group, part): [] for part in (False, True) for replica_group in self.order
        }
        for position, master in enumerate(masters):
            found[self.kind_of[id(master)]].append(position)
        return [
            (replica_group.holders(sharded=self.sharded), positions)
            for (replica_group, _), positions in found.items()
        ]


class SwappedGroupsStep:
    """``step_fragments`` for an optimizer without one: its groups hold the fragments during ``step``.

    ``by_rows``: parameters whose gradients it gets as torch's sparse tensors.
    """

    def __init__(self, store: StateStore, by_rows: Collection[nn.Parameter] = ()) -> None:
        self.store = store
        self.by_rows = {index for index, param in enumerate(store.params) if param in by_rows}

    def __call__(
        self, fragments: Sequence[GroupTensors], *, grad_scale: float, context: UpdateContext
    ) -> None:
        for owned, masters, grads, _ in fragments:
            if not grads:
                continue
            grads = [grad.to(master.dtype) for master, grad in zip(masters, grads, strict=True)]
            if grad_scale != 1.0:
                torch._foreach_mul_(grads, grad_scale)
            for part, master, grad in zip(owned, masters, grads, strict=True):
                by_rows = grad.dim() == 2 and part.param_index in self.by_rows
                master.grad = grad.to_sparse(1) if by_rows else grad
        try:
            with self.store.swap_groups([group.fragments for group in fragments]):
                self.store.optimizer.step()
        finally:
            for _, masters, _, _ in fragments:
                for master in masters:
                    master.grad = None
        for _, masters, _, lows in fragments:
            refresh_weights(masters, lows)


def params_by_group(
    params: Sequence[nn.Parameter], replica_groups: ReplicaGroups
) -> dict[ReplicaGroup, list[int]]:
    """Return the positions in ``params`` by replica group."""
    found: dict[ReplicaGroup, list[int]] = {}
    for index, param in enumerate(params):
        found.setdefault(replica_groups.of(param), []).append(index)
    return found


def local_squares(
    store: StateStore, members: Mapping[ReplicaGroup, Sequence[int]], *, sharded: bool = False
) -> float:
    """Return this rank's contribution to the squared norm where gradients are not summed (``Cadence.NEVER``).

    No rank knows the mean gradient. The norm is the root mean square of the holders' norms: at least the norm of the
    mean, and equal to it where all ranks have the same gradient. It is the same number on every rank, so that
    clipping scales all gradients alike and keeps the direction of their mean. Copies of experts that divide the
    tokens all count, as each has a different gradient.
    """
    total = 0.0
    for replica_group, params in members.items():
        chosen = set(params)
        grads = [
            part
            for owned in store.fragments
            if owned.param_index in chosen
            for part in (
                [owned.gradient()]
                if replica_group.divided
                else own_views(store.params[owned.param_index], owned.gradient(), owned.fragment.param_offset)
            )
        ]
        total += sum_of_squares(grads) / replica_group.holders(sharded=sharded).size
    return total
