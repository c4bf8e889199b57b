"""Find the placements of a module's parameters in global tensors: Megatron's marks, and experts.

Our own layers write ``param.ds_placement`` themselves (``deepspeed/checkpoint/placement.py``); this module reads the
marks of others. DTensors are read by ``transforms/distributed_tensors.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepspeed.base.sharded import full_shape
from deepspeed.checkpoint.placement import (
    ATTRIBUTE,
    EXPERTS,
    NUMBERED_EXPERTS,
    Placement,
    interval,
    is_numbered_expert,
    place,
    placement_of,
)
from deepspeed.checkpoint.shards import Region, regions, without
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.zero.replica_groups import SHARED_BY, ReplicaGroups

STACKED = "ds_stacked_experts"
"""Attribute of a parameter that stacks the experts' weights."""
_FOUND = "_ds_placement_was_found"
"""Attribute of a parameter whose placement, if any, was found here, not written by the layer that split it."""


def find_placements(params: Iterable[Tensor], mesh: ProcessMesh, replica_groups: ReplicaGroups) -> None:
    """Set the placement of every parameter that is not simply whole. Collective over ranks that split tensors.

    As in Megatron-LM, an unmarked parameter on tensor-parallel ranks is assumed to be a copy, which counts once.
    """
    params = list(params)
    unknown = [param for param in params if not hasattr(param, ATTRIBUTE) or hasattr(param, _FOUND)]
    for param in unknown:
        if hasattr(param, ATTRIBUTE):  # from an earlier engine, whose mesh may have differed
            delattr(param, ATTRIBUTE)
        setattr(param, _FOUND, True)
    if mesh.size("tp") > 1:
        _read_marks(unknown, mesh)
    if replica_groups.across:
        _mark_counted(unknown, mesh)
    for param in unknown:
        replica_group = replica_groups.of(param)
        if replica_group.kinds > 1 and not is_numbered_expert(param):
            place(param, placement_of(param).stacked(replica_group.kind, replica_group.kinds, EXPERTS))
    for param in params:
        known = placement_of(param)
        if is_numbered_expert(param) and NUMBERED_EXPERTS not in known.split:
            place(param, replace(known, split=(*known.split, NUMBERED_EXPERTS)))


def is_stack(param: Tensor) -> bool:
    """Return whether the first dim of a parameter enumerates experts with a matrix each."""
    stacked = bool(getattr(param, STACKED, False)) or not getattr(param, "allreduce", True)
    return stacked and len(full_shape(param)) > 2


def is_partial(param: Tensor, *, matrices: bool = False) -> bool:
    """Return whether the rank holds a part of a tensor, by any split except ZeRO's shards. With ``matrices``, a slice
    of a stack of whole matrices counts as whole."""
    placement, own = placement_of(param), tuple(full_shape(param))
    whole = placement.global_shape
    if EXPERTS in placement.split and len(whole) > len(own):
        whole = whole[1:]  # other ranks have different tensors of that name
    if len(whole) != len(own):  # split in an unknown way
        return True
    first = int(matrices and is_stack(param))
    return own[first:] != whole[first:]


def is_split_matrix(param: Tensor) -> bool:
    """Return whether ``param`` is a tensor-parallel part of a matrix that its ranks can assemble."""
    placement = placement_of(param)
    known = placement.split == ("tp",) and len(placement.global_shape) == len(full_shape(param))
    return known and not is_stack(param) and is_partial(param)


def whole_tensor(
    tensor: Tensor, replica_groups: ReplicaGroups, *, of: Tensor | None = None, share: int | None = None
) -> Tensor:
    """Return the global tensor of which ``tensor`` [the rank's shape] is a part, in its dtype, without gradient.
    Collective over the ranks of a split. Experts are stacked along a new first dim, over all ranks. ``of``: the
    parameter whose placement ``tensor`` has, if not its own. ``share``: for individually named experts, the position,
    among the ranks that share them, of the rank whose experts to return."""
    param = tensor if of is None else of
    placement, axes = placement_of(param), replica_groups.split_axes(param)
    spread = EXPERTS in placement.split or share is not None
    if not axes and not spread:
        return tensor.detach()
    flat = tensor.detach().reshape(-1)
    whole = tensor.new_zeros(placement.global_shape)
    replica_group = replica_groups.of(param)
    if not spread or (replica_group.first_holder and share in (None, replica_group.kind)):
        for region in _regions(placement, 0, flat.numel()):
            whole[tuple(slice(low, high) for low, high in region.box)] = _view(flat, region)
    sums = [replica_groups.across[axis] for axis in axes] + ([replica_groups.all_ranks] if spread else [])
    for communicator in sums:
        communicator.all_reduce(whole.view(-1)).wait()
    return whole


def own_views(param: Tensor, values: Tensor, start: int) -> list[Tensor]:
    """Return the views of ``values``, elements ``[start, start + numel)`` of the rank's flat ``param``, that count on
    this rank where every weight must count once."""
    placement = placement_of(param)
    if not placement.counts or not placement.elsewhere:
        return [values] if placement.counts else []
    found = _regions(placement, start, start + values.numel())
    return [_view(values.view(-1), region) for region in found]


def _regions(placement: Placement, start: int, stop: int) -> list[Region]:
    """Return the regions of the elements ``[start, stop)`` that no other rank counts."""
    return without(regions(placement.index("", start, stop)), placement.elsewhere)


def _view(flat: Tensor, region: Region) -> Tensor:
    shape = tuple(high - low for low, high in region.box)
    return flat.as_strided(shape, region.strides, flat.storage_offset() + region.offset)


def _read_marks(params: Sequence[Tensor], mesh: ProcessMesh) -> None:
    """Read ``tensor_model_parallel`` (or ``model_parallel``), ``partition_dim`` and ``partition_stride``, which
    Megatron-LM sets on parameters."""
    marked = [p for p in params if _is_split(p)]
    extents = _extents(marked, mesh)
    for param, sizes in zip(marked, extents, strict=True):
        place(param, _split(param, sizes, mesh.rank("tp")))


def _mark_counted(params: Sequence[Tensor], mesh: ProcessMesh) -> None:
    """Decide which copy counts: for copies on tensor-parallel ranks, the first rank's; for a weight that stages tie
    without a replica group, the one of the stage that does not mark it ``ds_pipe_replicated``."""
    first = mesh.rank("tp") == 0
    for param in params:
        tied = bool(getattr(param, "ds_pipe_replicated", False)) and not hasattr(param, SHARED_BY)
        if tied or not (first or _is_split(param)):
            place(param, replace(placement_of(param), counts=False))


def _is_split(param: Tensor) -> bool:
    return bool(getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False))


def _dim(param: Tensor) -> int | None:
    dim = getattr(param, "partition_dim", -1)
    return int(dim) if dim is not None and dim >= 0 else None


def _extents(params: Sequence[Tensor], mesh: ProcessMesh) -> list[list[int]]:
    """Return the extents of each parameter along its split dim on every tensor-parallel rank, which may differ."""
    if not params:
        return []
    own = [full_shape(p)[dim] if (dim := _dim(p)) is not None else 0 for p in params]
    count, device = mesh.size("tp"), params[0].device
    every = torch.empty(count * len(own), dtype=torch.int64, device=device)
    mesh.communicator("tp").all_gather(every, torch.tensor(own, dtype=torch.int64, device=device)).wait()
    return every.view(count, len(own)).T.tolist()


def _split(param: Tensor, sizes: Sequence[int], rank: int) -> Placement:
    dim, shape = _dim(param), tuple(full_shape(param))
    if dim is None:  # split in an unknown way: resumes only over as many ranks
        return Placement(global_shape=shape).stacked(rank, len(sizes), "tp")
    return interval(shape, dim, sizes, rank, stride=int(getattr(param, "partition_stride", 1) or 1))
