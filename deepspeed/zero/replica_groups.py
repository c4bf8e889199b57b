"""Groups of ranks that hold the same weights, per kind of weights.

A *replica group* is the ranks over which the gradients of a bucket are summed, how one copy of its states is sharded
among them, and by what the mean divides. Dense weights have one replica group, all data-parallel ranks (times those
that share a sequence). Other kinds, such as experts that are spread over neighbouring ranks, have replica groups of
their own over fewer ranks, with a factor that fits.

Plain ZeRO shards one copy across the whole replica group. MiCS (Z. Zhang et al.: MiCS: Near-linear scaling for training
gigantic model on public cloud, VLDB 2022) shards it across runs of ``mics_shard_size`` neighbouring ranks, so that
parameters are gathered within a run (one node, a fast link), and every run holds a replica.
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

DENSE = "dense"
"""The weights that all ranks hold."""
SHARED_BY = "ds_shared_by"
"""Attribute of a parameter that pipeline stages share: (name of its replica group, global ranks that hold it, those of
them that hold the same shard as this rank). The name begins with SHARED."""
SHARED = "shared by stages: "
DIVIDED = "ds_tokens_divided"
"""Attribute of an expert's parameter that is True where tensor-parallel ranks hold copies, and each takes a part of the
tokens: the gradients of all of them add up."""
BROADCAST_NUMEL = 16 * 1024 * 1024
"""Elements that leave the first rank together when an engine starts."""
_IN_PARTS = ", tokens divided"
_EXPERT_GROUP = re.compile(rf"ep_size_(\d+)(?:{_IN_PARTS})?")


def expert_parallel_size(name: str, ranks: int) -> int:
    """Over how many neighbouring ranks the weights of a replica group are spread. ValueError: the name does not fit."""
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
    """The kind of a parameter: DENSE, or the documented ``group_name`` of one with ``allreduce = False``, such as
    "ep_size_4": experts that are spread over runs of 4 neighbouring ranks. A weight that stages share has its own."""
    shared = getattr(param, SHARED_BY, None)
    if shared is not None:
        return str(shared[0])
    if getattr(param, "allreduce", True):
        return DENSE
    return str(getattr(param, "group_name", "ep_size_1")) + (
        _IN_PARTS if getattr(param, DIVIDED, False) else ""
    )


class Levels(NamedTuple):
    """Groups of neighbouring ranks (ZeRO++): those of this rank's group, and those with its place in every group. Shard
    r = g * near.size + i is that of place i in group g."""

    near: Communicator
    across: Communicator


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaGroup:
    """``all_ranks``, the ranks that hold these weights, is ``shard`` x ``replicas``: this rank's shard is one of
    ``shard.size``, and ``replicas.size`` ranks hold the same. The mean of gradients divides their sum by ``divisor``.
    Other ranks hold other weights under the same names: this is number ``kind`` of ``kinds``.
    """

    name: str
    all_ranks: Communicator
    shard: Communicator
    replicas: Communicator
    divisor: int
    kind: int = 0
    kinds: int = 1
    divided: bool = False
    """Whether ``replicas`` are tensor-parallel ranks that divide the tokens. As with dense weights, each writes its own
    copy to checkpoints, and placements say which one counts in the norm."""
    levels: Levels | None = None
    """Groups within ``shard`` that are linked faster than the rest, if the config says so."""

    @property
    def first_replica(self) -> bool:
        """Return whether this rank's copy counts where each shard must count once (norms)."""
        return self.divided or self.replicas.rank == 0

    @property
    def first_holder(self) -> bool:
        """Return whether this is the first of the ranks that hold the same, where each has all of it."""
        return self.shard.rank == 0 and self.first_replica

    @property
    def written_by(self) -> Communicator:
        """The ranks of which one writes each shard to a checkpoint."""
        return self.shard if self.divided else self.all_ranks

    @classmethod
    def whole(cls, all_ranks: Communicator, name: str = DENSE, divisor: int | None = None) -> ReplicaGroup:
        """Plain ZeRO: one copy."""
        return cls(name, all_ranks, all_ranks, Communicator(None), divisor or all_ranks.size)

    def mics(self, shard_size: int) -> ReplicaGroup:
        """One copy per ``shard_size`` ranks. Collective."""
        if self.name != DENSE and shard_size % self.all_ranks.size == 0:
            return self  # experts, of which a group of ranks has each once at most
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
        """With groups of ``size`` neighbours, if they divide the ranks into several groups of several. Collective."""
        if size <= 1 or size >= self.shard.size or self.shard.size % size:
            return self
        return replace(self, levels=Levels(*_split(self.shard, size)))


class ReplicaGroups:
    """The replica groups of a run. ``all_ranks``: all ranks that hold the same model and reduce its gradients together.
    ``across``: by axis, the ranks that hold other parts of the model (tensor and pipeline parallelism) and take a step
    together with this one: norm and skips are common, gradients are not. ``group_size``: neighbouring ranks that are
    linked faster than the rest (ZeRO++'s hpZ), within the ranks that share a copy."""

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
        """Return whether another rank holds some of the weights of this one, so that the sums of their gradients wait
        for it: also a rank of another stage (ties) or with other parts of the rest of the model (tokens divided)."""
        return any(replica_group.all_ranks.size > 1 for replica_group in self._known.values())

    @property
    def layers_exchange(self) -> bool:
        """Return whether layers exchange data, in forward and backward, among ranks that sum gradients: tokens of
        experts, or parts of a sequence."""
        return self._mesh.size("sp") > 1 or any(group.kinds > 1 for group in self._known.values())

    @cached_property
    def dense(self) -> ReplicaGroup:
        return self._known[DENSE]

    def find(self, params: Iterable[torch.Tensor]) -> ReplicaGroups:
        """Make the replica groups of all ``params``. Collective; the same kinds must occur, in any order, on every
        rank."""
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

    def split_axes(self, param: torch.Tensor) -> tuple[str, ...]:
        """Axes of ``across`` over which the tensor that ``param`` is a part of is spread."""
        return tuple(axis for axis in placement_of(param).split if axis in self.across)

    def parts_of(self, param: torch.Tensor) -> list[Communicator]:
        """The ranks with the other parts of the tensor that ``param`` is a part of, by what splits it. Collective."""
        found = [self.across[axis] for axis in self.split_axes(param)]
        replica_group = self.of(param)
        if EXPERTS in placement_of(param).split and replica_group.kinds > 1:
            found.append(self._mesh.among(self._mesh.sharing_experts(replica_group.kinds)))
        return found

    def shards(self) -> dict[str, int]:
        """In how many shards one copy is cut, by the name of the replica group."""
        return {name: replica_group.shard.size for name, replica_group in self._known.items()}

    def _sharded(self, replica_group: ReplicaGroup) -> ReplicaGroup:
        return (
            replica_group.mics(self.mics_shard_size)
            if self.mics_shard_size > 0
            else replica_group.grouped(self.group_size)
        )

    def _shared(self, name: str, all_ranks: Sequence[int], same: Sequence[int]) -> ReplicaGroup:
        """A weight on several stages: the gradients of all stages add up, and their mean is over the data. Each stage
        shards a copy of its own, so that it gathers without the others."""
        replica_group = ReplicaGroup.whole(
            _communicator(tuple(all_ranks), self.all_ranks), name, divisor=self.all_ranks.size
        )
        others = _communicator(tuple(same), self.all_ranks)
        return replace(replica_group, shard=self.all_ranks, replicas=others)

    def _experts(self, name: str, device: torch.device) -> ReplicaGroup:
        """Experts that some ranks share: the ranks with the same place among them hold the same ones. Each sees tokens
        of all that share, so that the mean is over all ranks."""
        ranks = len(self.all_ranks.ranks)
        size = expert_parallel_size(name, ranks)
        same = self._mesh.sharing_experts(size, same=True)
        # With one rank per share, every rank has all experts.
        holders = self._mesh.among(same, same=True) if size > 1 else self.all_ranks
        replica_group = ReplicaGroup.whole(holders, name, divisor=ranks)
        if size > 1:
            replica_group = replace(
                replica_group, kind=self._mesh.sharing_experts(size).index(self._mesh.global_rank), kinds=size
            )
        return (
            self._divided(replica_group, same, device)
            if name.endswith(_IN_PARTS)
            else self._sharded(replica_group)
        )

    def _divided(
        self, replica_group: ReplicaGroup, same: Sequence[int], device: torch.device
    ) -> ReplicaGroup:
        """The same where tensor-parallel ranks have copies and divide the tokens. Each shards a copy of its own, also
        with MiCS."""
        others = self.across["tp"]
        every = torch.empty(others.size * len(same), dtype=torch.int64, device=device)
        others.all_gather(every, torch.tensor(same, dtype=torch.int64, device=device)).wait()
        all_ranks = _communicator(tuple(sorted(every.tolist())), self.all_ranks)
        return replace(replica_group, all_ranks=all_ranks, replicas=others, divided=True)


def _split(ranks: Communicator, block: int) -> tuple[Communicator, Communicator]:
    """Those of this rank's run of ``block`` neighbours, and those with the same place in every run. Collective."""
    me = ranks.ranks[ranks.rank]
    runs = (split_ranks(ranks.ranks, me, block, inner=inner) for inner in (True, False))
    inner, across = (_communicator(run, ranks) for run in runs)
    return inner, across


def _communicator(ranks: tuple[int, ...], all_ranks: Communicator) -> Communicator:
    return all_ranks.beside(new_group(ranks)) if len(ranks) > 1 else Communicator(None)


class ReplicaGroupTable(Protocol):
    """Interface of ``ReplicaGroups`` that most parts use: those of a plan have no ranks behind them."""

    @property
    def all_ranks(self) -> Communicator: ...

    def __getitem__(self, name: str) -> ReplicaGroup: ...


# The same weights in a group --------------------------------------------------------------------------------


def broadcast_weights(module: nn.Module, replica_groups: ReplicaGroups) -> None:
    """Every rank starts from the weights of the first rank that holds the same ones, and from the buffers of the first
    rank: one flat broadcast per replica group and dtype, and one per axis over which placements say that weights are
    equal."""
    by_group: dict[str, list[torch.Tensor]] = {DENSE: list(module.buffers())}
    for param in module.parameters():
        if not is_zero_param(param):  # those sharded by zero.Init came from the first rank already
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
            for batch in _batches(group, BROADCAST_NUMEL):
                flat = torch.cat([t.reshape(-1) for t in batch])
                communicator.broadcast(flat.view(torch.uint8), src=0).wait()
                if communicator.rank:
                    for tensor, value in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                        tensor.copy_(value.view(tensor.shape))


def _batches(tensors: Sequence[torch.Tensor], numel: int) -> Iterable[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.numel() > numel:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.numel()
    if batch:
        yield batch


def check_ranks_agree(module: nn.Module, communicator: Communicator) -> None:
    """Require that all ranks built the same model with the same frozen parameters; says which rank differs and how."""
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
