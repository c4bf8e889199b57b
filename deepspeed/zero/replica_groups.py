"""Groups of ranks that hold the same weights, one per kind of weights.

A *replica group* says over which ranks the gradients of a bucket are summed, how one copy of its states is sharded
among them, and by what the mean divides. Dense weights have one replica group: all data-parallel ranks, times the
sequence-parallel ones. Other kinds, such as experts distributed over neighbouring ranks, have smaller replica groups
with their own divisor.

Plain ZeRO shards one copy across the whole replica group. MiCS (Z. Zhang et al.: MiCS: Near-linear scaling for
training gigantic model on public cloud, VLDB 2022) shards it across subgroups of ``mics_shard_size`` neighbouring
ranks, so that parameters are gathered within a subgroup (one node, a fast link), and every subgroup holds a replica.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import nn

from deepspeed.base.sharded import full_numel, is_zero_param
from deepspeed.checkpoint.placement import EXPERTS, placement_of
from deepspeed.comm.collectives import Communicator
from deepspeed.comm.groups import new_group
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.config.axes import split_ranks
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.zero.layout import batches

DENSE = "dense"
"""Weights that all ranks hold."""
SHARED_BY = "ds_shared_by"
"""Attribute of a parameter that pipeline stages share: (name of its replica group, global ranks that hold it, the
ones among them with the same shard as this rank). The name begins with SHARED."""
SHARED = "shared by stages: "
DIVIDED = "ds_tokens_divided"
"""Attribute of an expert's parameter: True if tensor-parallel ranks hold copies and each computes a part of the
tokens, so that their gradients add up."""
_COPIES = {
    "pp": "pipeline stages hold copies of tied weights",
    "tp": "tensor-parallel ranks hold copies of experts, each for its part of the tokens",
    "sp": "ranks that share a sequence hold copies of all weights",
}
"""By axis: the ranks along it that compute one batch with copies of the same weights."""
BROADCAST_NUMEL = 16 * 1024 * 1024
"""Elements per broadcast of the initial weights."""
_DIVIDED_SUFFIX = ", tokens divided"
_EXPERT_GROUP = re.compile(rf"ep_size_(\d+)(?:{_DIVIDED_SUFFIX})?")


def expert_parallel_size(name: str, ranks: int) -> int:
    """Return the number of neighbouring ranks over which the weights of a replica group are distributed.

    Raises:
        ValueError: the name is not "ep_size_N", or N does not divide ``ranks``.
    """
    if name == DENSE or name.startswith(SHARED):
        return 1
    match = _EXPERT_GROUP.fullmatch(name)
    size = int(match.group(1)) if match else 0
    if size < 1 or ranks % size:
        raise ValueError(
            f"a parameter with allreduce=False has group_name={name!r}: expected 'ep_size_N', where N divides the "
            f"{ranks} ranks with the same dense weights"
        )
    return size


def replica_group_name(param: torch.Tensor) -> str:
    """Return the kind of a parameter: DENSE, or the documented ``group_name`` of one with ``allreduce = False``, such
    as "ep_size_4" for experts distributed over 4 neighbouring ranks. A weight shared by pipeline stages has a group
    of its own."""
    shared = getattr(param, SHARED_BY, None)
    if shared is not None:
        return str(shared[0])
    if getattr(param, "allreduce", True):
        return DENSE
    suffix = _DIVIDED_SUFFIX if getattr(param, DIVIDED, False) else ""
    return str(getattr(param, "group_name", "ep_size_1")) + suffix


class Levels(NamedTuple):
    """Two-level groups of neighbouring ranks (ZeRO++): this rank's group (``near``), and the ranks at the same
    position in every group (``across``). Shard r = g * near.size + i belongs to position i of group g."""

    near: Communicator
    across: Communicator


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaGroup:
    """The ranks that hold the same weights, ``all_ranks`` = ``shard`` x ``replicas``.

    This rank holds one of ``shard.size`` shards, and ``replicas.size`` ranks hold the same one. The mean of gradients
    divides their sum by ``divisor``. Other ranks hold other weights under the same names: this is number ``kind`` of
    ``kinds``.
    """

    name: str
    all_ranks: Communicator
    shard: Communicator
    replicas: Communicator
    divisor: int
    kind: int = 0
    kinds: int = 1
    divided: bool = False
    """Whether ``replicas`` are tensor-parallel ranks that divide the tokens. As with dense weights, each writes its
    copy to checkpoints, and placements say which one counts in the norm."""
    levels: Levels | None = None
    """Groups within ``shard`` with faster links, if the config names any."""

    @property
    def first_replica(self) -> bool:
        """Return whether this rank's copy is the one that counts where each shard must count once (norms)."""
        return self.divided or self.replicas.rank == 0

    @property
    def first_holder(self) -> bool:
        """Return whether this is the first rank of the group, for states that every rank holds in full."""
        return self.shard.rank == 0 and self.first_replica

    def holders(self, *, sharded: bool) -> Communicator:
        """Return the ranks that hold the same masters as this one."""
        return self.replicas if sharded else self.all_ranks

    @property
    def written_by(self) -> Communicator:
        """Return the ranks among which each shard is written to a checkpoint once."""
        return self.shard if self.divided else self.all_ranks

    @classmethod
    def whole(cls, all_ranks: Communicator, name: str = DENSE, divisor: int | None = None) -> ReplicaGroup:
        """Return the group of plain ZeRO, with one copy over all ranks."""
        return cls(name, all_ranks, all_ranks, Communicator(None), divisor or all_ranks.size)

    def mics(self, shard_size: int) -> ReplicaGroup:
        """Return the group with one copy per ``shard_size`` ranks. Collective."""
        if self.name != DENSE and shard_size % self.all_ranks.size == 0:
            return self  # experts, each of which a subgroup holds at most once
        if self.all_ranks.size % shard_size:
            raise DeepSpeedConfigError(
                f"zero_optimization.mics_shard_size={shard_size} must divide the number of data-parallel ranks, "
                f"{self.all_ranks.size}"
            )
        if shard_size == self.all_ranks.size:
            return self
        inner, across = _split(self.all_ranks, shard_size)
        return replace(self, shard=inner, replicas=across)

    def grouped(self, size: int) -> ReplicaGroup:
        """Return the group with levels of ``size`` neighbours, if they divide the ranks into several groups of
        several ranks. Collective."""
        if size <= 1 or size >= self.shard.size or self.shard.size % size:
            return self
        return replace(self, levels=Levels(*_split(self.shard, size)))


class ReplicaGroups:
    """The replica groups of an engine.

    Args:
        mesh: the ranks. ``all_ranks`` (dp x sp) hold the same model and reduce its gradients together; ``across``
            has, by axis, the ranks with other parts of the model (tensor and pipeline parallelism) that step together
            with this one: norm and skips are common, gradients are not.
        mics_shard_size: ranks per copy of the states (MiCS); -1: all.
        group_size: neighbouring ranks with faster links (ZeRO++'s hpZ), within the ranks that share a copy.
    """

    def __init__(self, mesh: ProcessMesh, mics_shard_size: int = -1, group_size: int = 1) -> None:
        self.group_size = group_size
        self.all_ranks = mesh.communicator("dp", "sp")
        if group_size > 1 and self.all_ranks.size > group_size and self.all_ranks.size % group_size:
            raise DeepSpeedConfigError(
                f"zero_optimization.zero_hpz_partition_size={group_size} must divide the number of data-parallel "
                f"ranks, {self.all_ranks.size}; the number of ranks per host is a good value"
            )
        self.across = {axis: mesh.communicator(axis) for axis in ("tp", "pp") if mesh.size(axis) > 1}
        self.mics_shard_size = mics_shard_size
        self._mesh = mesh
        self._known = {DENSE: self._sharded(ReplicaGroup.whole(self.all_ranks))}

    @property
    def share_weights(self) -> bool:
        """Return whether any other rank holds some of this rank's weights, so that their gradient sums wait for it.
        Ranks of other pipeline stages (ties) and of the tensor-parallel group (divided tokens) count too."""
        return any(replica_group.all_ranks.size > 1 for replica_group in self._known.values())

    @property
    def layers_exchange(self) -> bool:
        """Return whether layers exchange data in forward and backward among ranks that sum gradients: tokens of
        experts, or parts of a sequence."""
        return self._mesh.size("sp") > 1 or any(group.kinds > 1 for group in self._known.values())

    @cached_property
    def dense(self) -> ReplicaGroup:
        return self._known[DENSE]

    def find(self, params: Iterable[torch.Tensor]) -> ReplicaGroups:
        """Make the replica groups of all ``params``. Collective; every rank must have the same kinds, in any order."""
        one_of = {replica_group_name(param): param for param in params}
        for name in sorted(one_of.keys() - self._known.keys()):
            shared = getattr(one_of[name], SHARED_BY, None)
            self._known[name] = (
                self._experts(name, one_of[name].device) if shared is None else self._shared(*shared)
            )
        return self

    def __getitem__(self, name: str) -> ReplicaGroup:
        return self._known[name]

    def of(self, param: torch.Tensor) -> ReplicaGroup:
        return self._known[replica_group_name(param)]

    def copies_of_one_batch(self, params: Iterable[torch.Tensor], *, sharded: bool) -> str:
        """Return which ranks compute one batch and hold copies of some of ``params``, as text; "" if none do.
        ``sharded``: each rank holds a shard of its copy."""
        holders = {self.of(param).holders(sharded=sharded) for param in params}
        held = {rank for each in holders for rank in each.ranks} - {self._mesh.global_rank}
        return next((text for axis, text in _COPIES.items() if held & {*self._mesh.ranks(axis)}), "")

    def split_axes(self, param: torch.Tensor) -> tuple[str, ...]:
        """Return the axes of ``across`` over which the global tensor of ``param`` is split."""
        return tuple(axis for axis in placement_of(param).split if axis in self.across)

    def parts_of(self, param: torch.Tensor) -> list[Communicator]:
        """Return communicators to the ranks that hold the other parts of the global tensor of ``param``, one per axis
        that splits it. Collective."""
        found = [self.across[axis] for axis in self.split_axes(param)]
        replica_group = self.of(param)
        if EXPERTS in placement_of(param).split and replica_group.kinds > 1:
            found.append(self._mesh.among(self._mesh.sharing_experts(replica_group.kinds)))
        return found

    def shards(self) -> dict[str, int]:
        """Return the number of shards per copy, by the name of the replica group."""
        return {name: replica_group.shard.size for name, replica_group in self._known.items()}

    def _sharded(self, replica_group: ReplicaGroup) -> ReplicaGroup:
        if self.mics_shard_size > 0:
            return replica_group.mics(self.mics_shard_size)
        return replica_group.grouped(self.group_size)

    def _shared(self, name: str, all_ranks: Sequence[int], same: Sequence[int]) -> ReplicaGroup:
        """Return the group of a weight on several pipeline stages: gradients of all stages add up, and the mean is
        over the data. Each stage shards its own copy, so that it gathers without the others."""
        everyone = _communicator(tuple(all_ranks), self.all_ranks)
        others = _communicator(tuple(same), self.all_ranks)
        return ReplicaGroup(name, everyone, self.all_ranks, others, divisor=self.all_ranks.size)

    def _experts(self, name: str, device: torch.device) -> ReplicaGroup:
        """Return the group of experts distributed over ranks: ranks at the same position hold the same experts. Each
        expert sees tokens of all ranks that share the set, so the mean is over all ranks."""
        ranks = len(self.all_ranks.ranks)
        size = expert_parallel_size(name, ranks)
        same = self._mesh.sharing_experts(size, same=True)
        # With one rank per share, every rank has all experts.
        holders = self._mesh.among(same, same=True) if size > 1 else self.all_ranks
        kind = self._mesh.sharing_experts(size).index(self._mesh.global_rank)
        replica_group = replace(ReplicaGroup.whole(holders, name, divisor=ranks), kind=kind, kinds=size)
        if name.endswith(_DIVIDED_SUFFIX):
            return self._divided(replica_group, same, device)
        return self._sharded(replica_group)

    def _divided(
        self, replica_group: ReplicaGroup, same: Sequence[int], device: torch.device
    ) -> ReplicaGroup:
        """Extend a group of experts by the tensor-parallel ranks that hold copies and divide the tokens. Each of them
        shards its own copy, also with MiCS."""
        others = self.across["tp"]
        every = torch.empty(others.size * len(same), dtype=torch.int64, device=device)
        others.all_gather(every, torch.tensor(same, dtype=torch.int64, device=device)).wait()
        all_ranks = _communicator(tuple(sorted(every.tolist())), self.all_ranks)
        return replace(replica_group, all_ranks=all_ranks, replicas=others, divided=True)


def _split(ranks: Communicator, block: int) -> tuple[Communicator, Communicator]:
    """Return this rank's block of ``block`` neighbours, and the ranks at the same position in every block.
    Collective."""
    me = ranks.ranks[ranks.rank]
    runs = (split_ranks(ranks.ranks, me, block, inner=inner) for inner in (True, False))
    inner, across = (_communicator(run, ranks) for run in runs)
    return inner, across


def _communicator(ranks: tuple[int, ...], all_ranks: Communicator) -> Communicator:
    return all_ranks.for_group(new_group(ranks)) if len(ranks) > 1 else Communicator(None)


class ReplicaGroupTable(Protocol):
    """Interface of ``ReplicaGroups`` that most parts use; in a plan there are no ranks behind it."""

    @property
    def all_ranks(self) -> Communicator: ...

    def __getitem__(self, name: str) -> ReplicaGroup: ...


# The same weights in a group --------------------------------------------------------------------------------


def broadcast_weights(module: nn.Module, replica_groups: ReplicaGroups) -> None:
    """Start every rank from the weights of the first rank that holds the same ones, and from the buffers of the first
    rank.

    One flat broadcast per replica group and dtype, and one per axis along which placements say that weights are
    equal.
    """
    by_group: dict[str, list[torch.Tensor]] = {DENSE: list(module.buffers())}
    for param in module.parameters():
        if not is_zero_param(param):  # zero.Init has already broadcast those it sharded
            by_group.setdefault(replica_group_name(param), []).append(param.data)
    for name, tensors in sorted(by_group.items()):
        if replica_groups[name].all_ranks.size > 1:
            _broadcast(tensors, replica_groups[name].all_ranks)
    for axis, others in replica_groups.across.items():
        equal = [p.data for p in module.parameters() if axis in placement_of(p).replicated]
        _broadcast([data for data in equal if data.numel()], others)


def _broadcast(tensors: Iterable[torch.Tensor], communicator: Communicator) -> None:
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for group in by_kind.values():
            for batch in batches(group, torch.Tensor.numel, BROADCAST_NUMEL):
                flat = torch.cat([t.reshape(-1) for t in batch])
                communicator.broadcast(flat.view(torch.uint8), src=0).wait()
                if communicator.rank:
                    for tensor, value in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                        tensor.copy_(value.view(tensor.shape))


def check_ranks_agree(module: nn.Module, communicator: Communicator) -> None:
    """Check that all ranks built the same model with the same frozen parameters.

    Raises:
        RuntimeError: they did not; it lists the counts of every rank.
    """
    if communicator.size == 1:
        return
    params = list(module.parameters())
    counts = [len(params), sum(map(full_numel, params)), sum(p.requires_grad for p in params)]
    device = params[0].device if params else torch.device("cpu")
    extremes = torch.tensor([*counts, *(-count for count in counts)], dtype=torch.int64, device=device)
    communicator.all_reduce_max(extremes).wait()
    highest, lowest = extremes.view(2, -1).tolist()
    if highest == [-value for value in lowest]:
        return
    every = torch.empty(len(counts) * communicator.size, dtype=torch.int64, device=device)
    communicator.all_gather(every, torch.tensor(counts, dtype=torch.int64, device=device)).wait()
    rows = every.view(-1, len(counts)).tolist()
    listing = "; ".join(
        f"rank {r}: {n} parameters, {e} elements, {t} trainable" for r, (n, e, t) in enumerate(rows)
    )
    raise RuntimeError(
        f"ranks disagree on the model ({listing}); build the same model with the same frozen parameters on every rank."
    )
