"""Documented getters of process groups, over the mesh of the newest engine.

Code in this package is passed its mesh and does not use them. Without a mesh all ranks are data parallel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroup

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.exceptions import DeprecatedException
from deepspeed.comm.mesh import ProcessMesh, meshes


@dataclass
class _Registered:
    # This rank's groups of experts by name, which scripts may change: those that share one set, and those that hold
    # the same ones.
    sharing: dict[str, ProcessGroup] = field(default_factory=dict)
    same: dict[str, ProcessGroup] = field(default_factory=dict)
    # This rank's other groups, made by the functions further below: by name, with their default group.
    groups: dict[str, tuple[ProcessGroup, ProcessGroup | None]] = field(default_factory=dict)
    # Over how many ranks an expert of these groups is split.
    parts_of_experts: int = 1


_registered = _Registered()

mpu: Any = None
"""For scripts that check for a unit. The getters use the mesh, which is built from the caller's unit."""


def set_mesh(mesh: ProcessMesh | None) -> None:
    """Make the getters report ``mesh`` until the next engine is built; None: forget every mesh."""
    global _registered
    meshes.by_hand = mesh
    if mesh is None:
        meshes.engines.clear()
        _registered = _Registered()
    meshes.tensor_parallel.clear()


def get_mesh() -> ProcessMesh | None:
    return meshes.by_hand or meshes.engines.get()


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    raise DeprecatedException(
        "groups.initialize() is deprecated: pass ep_size to deepspeed.parallel.expert.layer.MoE(...) instead."
    )


def _initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _size(*axes: str) -> int:
    if (mesh := get_mesh()) is not None:
        return mesh.size(*axes)
    return torch.distributed.get_world_size() if "dp" in axes and _initialized() else 1


def _rank(*axes: str) -> int:
    if (mesh := get_mesh()) is not None:
        return mesh.rank(*axes)
    return torch.distributed.get_rank() if "dp" in axes and _initialized() else 0


def _group(*axes: str) -> ProcessGroup | None:
    """Return the group over these axes; None without such parallelism or any process group."""
    if not _initialized():
        return None
    if (mesh := get_mesh()) is not None:
        return mesh.group(*axes)
    return torch.distributed.group.WORLD if "dp" in axes else None


def _ranks(*axes: str) -> list[int]:
    if (mesh := get_mesh()) is not None:
        return list(mesh.ranks(*axes))
    return list(range(_size(*axes))) if "dp" in axes else [_rank("dp")]


# --- Data parallel --------------------------------------------------------------------------------

get_data_parallel_group = _get_data_parallel_group = partial(_group, "dp")
get_data_parallel_world_size = _get_data_parallel_world_size = partial(_size, "dp")
get_data_parallel_rank = partial(_rank, "dp")


def _get_broadcast_src_rank() -> int:
    """Return the global rank of the first rank that holds the same weights."""
    return _ranks("dp", "sp")[0]


# --- Tensor parallel, also called model parallel --------------------------------------------------

get_tensor_model_parallel_group = partial(_group, "tp")


def get_tensor_model_parallel_world_size() -> int:
    return meshes.tensor_parallel.get("size") or _size("tp")


def get_tensor_model_parallel_rank() -> int:
    return meshes.tensor_parallel.get("rank", _rank("tp"))


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first member of this rank's tensor-parallel group."""
    return _ranks("tp")[0]


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    meshes.tensor_parallel["size"] = world_size


def set_tensor_model_parallel_rank(rank: int) -> None:
    meshes.tensor_parallel["rank"] = rank


get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank
_get_model_parallel_world_size = get_tensor_model_parallel_world_size


# --- Sequence parallel ----------------------------------------------------------------------------


def _get_sequence_parallel_group() -> ProcessGroup | None:
    """Return the sequence-parallel group; None if sequences are not sharded."""
    return _group("sp") if _size("sp") > 1 else None


_get_sequence_parallel_world_size = partial(_size, "sp")
_get_sequence_parallel_rank = partial(_rank, "sp")

# Of all ranks that hold the same dense weights.
_get_sequence_data_parallel_group = partial(_group, "dp", "sp")
_get_sequence_data_parallel_world_size = partial(_size, "dp", "sp")
_get_sequence_data_parallel_rank = partial(_rank, "dp", "sp")

# --- Expert parallel ------------------------------------------------------------------------------
#
# A group's name ("ep_size_4") has the number of ranks that a layer's experts are distributed over.


class _NotDivisible(AssertionError, ValueError):
    """Indivisible sizes. Scripts catch either base type."""


def _ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise if ``denominator`` does not divide ``numerator``."""
    if denominator == 0:
        raise _NotDivisible(f"{numerator} cannot be divided: the denominator must be non-zero")
    if numerator % denominator:
        raise _NotDivisible(f"{numerator} is not divisible by {denominator}")


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return (groups that share one set of experts, groups that hold the same experts), each as lists of ranks.

    Rank numbers vary fastest along tensor parallelism, then data, then stages. With
    ``use_data_before_expert_parallel_`` the ranks with the same experts are neighbours.
    """
    _ensure_divisibility(world_size, tensor_parallel_size_ * pipeline_parallel_size_)
    of_stage = world_size // pipeline_parallel_size_
    data_parallel = of_stage // tensor_parallel_size_
    _ensure_divisibility(data_parallel, expert_parallel_size_)
    replicas = data_parallel // expert_parallel_size_
    sharing: list[list[int]] = []
    same: list[list[int]] = []
    for stage in range(pipeline_parallel_size_):
        for tensor in range(tensor_parallel_size_):
            ranks = range(stage * of_stage + tensor, (stage + 1) * of_stage, tensor_parallel_size_)
            blocks = [
                list(ranks[i : i + expert_parallel_size_])
                for i in range(0, len(ranks), expert_parallel_size_)
            ]
            strides = [list(ranks[i::expert_parallel_size_]) for i in range(expert_parallel_size_)]
            if use_data_before_expert_parallel_:
                blocks = [list(ranks[i::replicas]) for i in range(replicas)]
                strides = [list(ranks[i : i + replicas]) for i in range(0, len(ranks), replicas)]
            sharing += blocks
            same += strides
    return sharing, same


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Create the groups named ``ep_size_<expert_parallel_size_>``; every rank calls it. ``MoE`` does not need it.
    With an engine, its mesh decides the order of ranks."""
    _make_expert_groups(expert_parallel_size_, 1, 1, use_data_before_expert_parallel_)


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any, use_data_before_expert_parallel_: bool = False
) -> None:
    """Create these groups among the ranks with the same part of dense layers and stage, where ``mpu`` splits them."""
    tensor, stages = bwc_tensor_model_parallel_world_size(mpu), bwc_pipeline_parallel_world_size(mpu)
    _make_expert_groups(expert_parallel_size_, tensor, stages, use_data_before_expert_parallel_)
    _registered.parts_of_experts = tensor


def _make_expert_groups(size: int, tensor: int, stages: int, data_before_experts: bool) -> None:
    if not _initialized():
        raise RuntimeError("expert groups need a process group: call deepspeed.init_distributed() first")
    name, mesh = f"ep_size_{size}", get_mesh()
    if mesh is not None:
        for same, registered in ((False, _registered.sharing), (True, _registered.same)):
            group = mesh.among(mesh.sharing_experts(size, same=same), same=same).group
            if group is not None:
                registered[name] = group
        return
    if name in _expert_groups(same=True):
        return
    everyone = torch.distributed.get_world_size()
    replicas = everyone // (tensor * stages)
    if size < 1 or replicas % size:
        raise ValueError(f"expert_parallel_size_={size} does not divide the {replicas} ranks")
    sharing, same_experts = _get_expert_parallel_ranks(everyone, tensor, size, stages, data_before_experts)
    for parts, registered in ((sharing, _registered.sharing), (same_experts, _registered.same)):
        # Every rank creates all of them.
        made: list[Any] = [torch.distributed.new_group(ranks) for ranks in parts]
        registered[name] = next(g for g, ranks in zip(made, parts, strict=True) if _global_rank() in ranks)


def _expert_groups(*, same: bool) -> dict[str, ProcessGroup]:
    """Return this rank's groups of experts by name: those made by hand that still exist, to which the caller may add
    some; or a copy, with those of the newest engine's layers."""
    made, mesh = _registered.same if same else _registered.sharing, get_mesh()
    for name in [name for name, group in made.items() if not _exists(group)]:
        del made[name]
    if mesh is None or not mesh.expert_sizes:
        return made
    of = {
        n: mesh.among(mesh.sharing_experts(n, same=same), same=same).group for n in sorted(mesh.expert_sizes)
    }
    return made | {f"ep_size_{n}": group for n, group in of.items() if group is not None}


def _exists(group: ProcessGroup) -> bool:
    try:
        return bool(torch.distributed.get_process_group_ranks(group))
    except KeyError:
        return False


def __getattr__(name: str) -> Any:
    """Return the tables of expert groups, which scripts read and write."""
    table, ranks, _ = name.partition("_RANKS")
    if table not in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"):
        advice = "its _get_..._group() functions return the groups of the newest engine"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {advice}")
    found = _expert_groups(same="DATA" in table)
    return (
        {name: torch.distributed.get_process_group_ranks(g) for name, g in found.items()} if ranks else found
    )


def _expert_parallel_size(group_name: str) -> int:
    digits = group_name.rpartition("_")[2]
    if not digits.isdigit():
        raise ValueError(f"there is no expert group {group_name!r}: expected a name such as 'ep_size_4'")
    return int(digits)


def _sharing_experts(group_name: str, *, same: bool) -> list[int]:
    size, mesh = _expert_parallel_size(group_name), get_mesh()
    if mesh is not None:
        return list(mesh.sharing_experts(size, same=same))
    made = _expert_groups(same=same).get(group_name)
    if made is not None:
        return torch.distributed.get_process_group_ranks(made)
    everyone = _ranks("dp")
    place = everyone.index(_rank("dp"))
    return everyone[place % size :: size] if same else everyone[place - place % size :][:size]


def _expert_group(group_name: str, *, same: bool) -> ProcessGroup | None:
    """Return this rank's group; None for one rank, or without an engine and ``_create_expert_and_data_parallel``."""
    if not _initialized():
        return None
    if (mesh := get_mesh()) is None:
        return _expert_groups(same=same).get(group_name)
    return mesh.among(mesh.sharing_experts(_expert_parallel_size(group_name), same=same), same=same).group


_get_expert_parallel_group = partial(_expert_group, same=False)
_get_expert_data_parallel_group = partial(_expert_group, same=True)
_get_expert_parallel_group_dict = partial(_expert_groups, same=False)
_get_expert_data_parallel_group_dict = partial(_expert_groups, same=True)


def _get_expert_parallel_world_size(group_name: str) -> int:
    return len(_sharing_experts(group_name, same=False))


def _get_expert_parallel_rank(group_name: str) -> int:
    return _sharing_experts(group_name, same=False).index(_global_rank())


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return _sharing_experts(group_name, same=True).index(_global_rank())


def _get_expert_model_parallel_world_size() -> int:
    """Return the number of ranks that each expert is split over; 1: the ranks divide the tokens, if they divide any."""
    mesh = get_mesh()
    return mesh.size("tp") if mesh is not None and mesh.splits_experts else _registered.parts_of_experts


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    """Return the first of the ranks that hold the same experts as this one."""
    return _sharing_experts(group_name, same=True)[0]


def _global_rank() -> int:
    return torch.distributed.get_rank() if _initialized() else 0


def _get_max_expert_size() -> int | None:
    """Return the largest expert-parallel size of the groups; None: there are none."""
    return max(map(_expert_parallel_size, _get_expert_parallel_group_dict()), default=None)


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> ProcessGroup | None:
    return _get_expert_parallel_group(_get_max_expert_size_name())


# --- Groups for scripts, separate from those of engines -------------------------------------------
#
# Every rank calls their functions; they are created once.


def _existing_group(name: str) -> ProcessGroup | None:
    group, world = _registered.groups.get(name, (None, None))
    return group if world is torch.distributed.group.WORLD else None


def _get_or_create(name: str, *parts: range) -> ProcessGroup:
    """Return this rank's group of ``parts``, which contain every rank once; create them at the first call."""
    if not _initialized():
        raise RuntimeError(f"the group {name} needs a process group: call deepspeed.init_distributed() first")
    found = _existing_group(name)
    if found is None:
        everyone: list[Any] = [torch.distributed.new_group(list(ranks)) for ranks in parts]
        found = next(g for g, ranks in zip(everyone, parts, strict=True) if _global_rank() in ranks)
        _registered.groups[name] = (found, torch.distributed.group.WORLD)
    return found


def _create_zero_param_parallel_group(group_size: int) -> None:
    """Create groups of ``group_size`` neighbours, or of all ranks if there are fewer, for
    ``zero_hpz_partition_size``; an engine creates its own. ValueError: the size does not divide the ranks, or the
    groups exist."""
    everyone = torch.distributed.get_world_size() if _initialized() else 1
    size = min(group_size, everyone)
    if size < 1 or everyone % size:
        raise ValueError(f"group_size={group_size} does not divide the {everyone} ranks")
    if _existing_group("parameters") is not None:
        raise ValueError("ZeRO parameter intra parallel group is already initialized: use the existing group")
    _get_or_create("parameters", *(range(first, first + size) for first in range(0, everyone, size)))


def _get_zero_param_intra_parallel_group() -> ProcessGroup | None:
    """Return the group of ``_create_zero_param_parallel_group``; None: not created."""
    return _existing_group("parameters")


def _get_local_all_to_all_group() -> dict[str, ProcessGroup]:
    """Return this rank's groups for ``all_to_all_quant_reduce``: "local_i", the ranks of the i-th host, and with
    several hosts "global_j", the j-th rank of each. A host has as many ranks as the accelerator counts devices.
    ValueError: the hosts have unequal numbers of ranks."""
    everyone = torch.distributed.get_world_size() if _initialized() else 1
    each = min(get_accelerator().device_count(), everyone)
    if everyone % each:
        raise ValueError(f"{everyone} ranks are not {each} per host: start the same number on every host")
    hosts = [range(first, first + each) for first in range(0, everyone, each)]
    host, place = divmod(_global_rank(), each)
    found = {f"local_{host}": _get_or_create(f"hosts of {each}", *hosts)}
    if len(hosts) > 1:
        places = [range(first, everyone, each) for first in range(each)]
        found[f"global_{place}"] = _get_or_create(f"across hosts of {each}", *places)
    return found


# --- Model-parallel units, with every generation of method names ----------------------------------
#
# Megatron's units use `model_parallel` or `tensor_model_parallel`, and for stages `pipe_parallel` or
# `pipeline_model_parallel`. Without a unit there is one rank, and no group.

TENSOR = ("tensor_model_parallel", "slice_parallel", "model_parallel")
PIPELINE = ("pipeline_model_parallel", "pipe_parallel")


def _call_getter(mpu: Any = None, *, kinds: tuple[str, ...], what: str, otherwise: Any) -> Any:
    for kind in kinds:
        method = getattr(mpu, f"get_{kind}_{what}", None)
        if method is not None:
            return method()
    return otherwise


bwc_tensor_model_parallel_rank = partial(_call_getter, kinds=TENSOR, what="rank", otherwise=0)
bwc_tensor_model_parallel_world_size = partial(_call_getter, kinds=TENSOR, what="world_size", otherwise=1)
bwc_tensor_model_parallel_group = partial(_call_getter, kinds=TENSOR, what="group", otherwise=None)
bwc_pipeline_parallel_world_size = partial(_call_getter, kinds=PIPELINE, what="world_size", otherwise=1)
bwc_pipeline_parallel_group = partial(_call_getter, kinds=PIPELINE, what="group", otherwise=None)


for _name, _getter in list(globals().items()):
    if isinstance(_getter, partial):  # which has no name of its own for code that logs or wraps functions
        setattr(_getter, "__name__", _name)  # noqa: B010 - the type has no such attribute
