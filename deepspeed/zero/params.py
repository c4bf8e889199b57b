"""Manage the ``ds_*`` attributes that clients read on partitioned parameters; no other module writes them.

A partitioned parameter has an *owner*: the bucket that holds its shards, or, between ``zero.Init`` and
``initialize``, the parameter's own shard. All outside access goes through the owner.
"""

from __future__ import annotations

import enum
import inspect
import itertools
from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepspeed.base.exceptions import ExplainedError
from deepspeed.base.logging import log_dist
from deepspeed.base.sharded import full_shape, is_zero_param


class ZeroParamStatus(enum.Enum):
    """Status of a parameter: in memory as a whole or not. Each parameter has one, which follows the status of its
    owner."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    """Documented kinds of parameters; a partitioned one is PARTITIONED."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeRORuntimeException(ExplainedError, RuntimeError):
    """Documented error for operations on partitioned parameters."""


class ShardOwner(Protocol):
    """Holder of the shards of a partitioned parameter; ``position`` is the parameter's index in it."""

    communicator: Any
    """Over the ranks that together hold one copy of the parameter."""
    all_ranks: Any
    """Over all ranks that hold any copy of the parameter."""
    standalone: bool
    """Whether ``zero.Init`` sharded the parameter individually and no engine has taken it over yet."""

    def local_part(self, position: int) -> Tensor: ...
    def read_param(self, position: int, out: Tensor) -> None: ...
    def write_param(self, position: int, value: Tensor) -> None: ...


GATHER_COUNT = "_ds_gather_count"
"""Parameter attribute: the number of open ``GatheredParameters`` blocks that hold it."""

GATHERED_ALONE = "_ds_gathered_alone"
"""Parameter attribute, set between ``all_gather`` and ``partition`` of this parameter. Equal on all ranks, whereas the
status may be AVAILABLE on some only: those that have used the bucket in a forward."""

CHECKS_WRITES = "_ds_checks_writes"
"""Parameter attribute: whether writes that ``GatheredParameters`` would discard raise an error."""

_ids = itertools.count()
_DEEPCOPY = "__deepcopy__"


def is_castable(tensor: Tensor) -> bool:
    """Return whether ``tensor`` follows the model's dtype. Integers do not, nor do quantized values such as frozen
    8-bit weights, which are meaningless without their scales."""
    return tensor.is_floating_point() and (tensor.itemsize > 1 or tensor.requires_grad)


def convert(param: nn.Parameter, owner: ShardOwner, position: int, shape: torch.Size) -> None:
    """Mark an unpartitioned parameter, whose whole has this shape, as partitioned and held by ``owner``."""
    attributes: Any = param
    attributes.ds_shape, attributes.ds_numel = shape, shape.numel()
    attributes.ds_id = next(_ids)
    attributes.ds_param_type = ZeroParamType.PARTITIONED
    attributes.ds_persist = False
    attributes.ds_active_sub_modules = set()
    attributes.ds_secondary_tensor = attributes.ds_zero_param_process_group = None
    attributes.ds_status = ZeroParamStatus.AVAILABLE
    for method in _METHODS:
        setattr(param, method.__name__, MethodType(method, param))
    setattr(param, _DEEPCOPY, MethodType(_deepcopy, param))
    _assign_owner(param, owner, position)


def adopt(param: nn.Parameter, owner: ShardOwner, position: int) -> None:
    """Move a parameter, partitioned or not, into ``owner``."""
    if is_zero_param(param):
        _assign_owner(param, owner, position)
    else:
        convert(param, owner, position, owner.views[position].shape)  # type: ignore[attr-defined]


def adopt_copy(param: nn.Parameter, original: nn.Parameter, owner: ShardOwner) -> None:
    """Turn the empty ``param`` into a partitioned parameter like ``original``, held by ``owner``."""
    convert(param, owner, 0, full_shape(original))
    mark([param], ZeroParamStatus.NOT_AVAILABLE)


def _assign_owner(param: nn.Parameter, owner: ShardOwner, position: int) -> None:
    attributes: Any = param
    attributes.ds_owner, attributes.ds_position = owner, position
    attributes.ds_process_group = owner.communicator.group
    attributes.ds_zero_partition_rank = owner.communicator.rank
    attributes.ds_zero_partition_world_size = owner.communicator.size
    local = owner.local_part(position)
    local.ds_numel = local.numel()  # type: ignore[attr-defined]
    local.status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    local.final_location = None  # type: ignore[attr-defined]
    attributes.ds_tensor = local
    attributes.ds_numel_aligned = local.numel() * owner.communicator.size
    attributes.ds_persist = getattr(owner, "persistent", False)


def set_secondary_group(param: nn.Parameter, near: Any, *, all_holders: bool) -> None:
    """Record that ``param`` is gathered from the ranks of ``near`` only (ZeRO++'s hpZ).

    ``all_holders``: these ranks hold one complete copy, so this rank's secondary shard is its primary one.
    """
    attributes: Any = param
    attributes.ds_zero_param_process_group = near
    attributes.ds_secondary_tensor = attributes.ds_tensor if all_holders else None


def mark(params: Iterable[nn.Parameter], status: ZeroParamStatus) -> None:
    for param in params:
        param.ds_status = status  # type: ignore[attr-defined]


def forget(param: nn.Parameter) -> None:
    """Turn ``param`` back into an ordinary parameter."""
    for name in _ATTRIBUTES:
        vars(param).pop(name, None)  # type: ignore[attr-defined]


def _deepcopy(param: Any, memo: dict[int, Any]) -> Any:
    """Implement ``copy.deepcopy``, with which ``nn.TransformerEncoder`` creates its layers.

    If only this rank's shard exists, the copy is a parameter with a shard of its own. A gathered parameter is copied
    as an ordinary one, which belongs to no engine.
    """
    copy_of = getattr(param.ds_owner, "copy_of", None)
    if copy_of is None or param.ds_status is not ZeroParamStatus.NOT_AVAILABLE:
        return nn.Parameter.__deepcopy__(param, memo)
    if id(param) not in memo:
        memo[id(param)] = copy_of(param)
    return memo[id(param)]


def sync_shard_dtype(param: Any) -> None:
    """Convert the shard to the dtype that ``module.double()`` and the like gave the partitioned parameter."""
    cast = getattr(param.ds_owner, "cast", None)
    if cast is not None and param.ds_tensor.dtype != param.dtype:
        cast(param, param.dtype)


def read_full(param: Tensor, out: Tensor) -> None:
    """Copy the whole parameter into ``out`` [full shape]. Collective if partitioned."""
    if is_zero_param(param):
        sync_shard_dtype(param)
        param.ds_owner.read_param(param.ds_position, out)  # type: ignore[attr-defined]
    else:
        out.copy_(param.data)


def gather_permanently(module: nn.Module) -> None:
    """Turn what ``zero.Init`` partitioned into ordinary parameters, for engines that never gather (stages 0 to 2).

    Parameters that a stage-3 engine holds are left alone. Collective.
    """
    held = [
        param for param in module.parameters() if is_zero_param(param) and vars(param)["ds_owner"].standalone
    ]
    for param in held:
        whole = torch.empty(full_shape(param), dtype=param.dtype, device=param.device)
        read_full(param, whole)
        forget(param)
        param.data = whole
    if held:
        log_dist(
            f"{len(held)} parameters partitioned by zero.Init were gathered permanently: only stage 3 "
            "keeps them partitioned",
            ranks=[0],
        )


# Documented methods of a partitioned parameter --------------------------------------------------------------


def partition_numel(param: Any) -> int:
    """Return the number of elements in this rank's shard."""
    return param.ds_tensor.ds_numel


def aligned_size(param: Any) -> int:
    return param.ds_numel_aligned


def padding_size(param: Any) -> int:
    return max(0, param.ds_numel_aligned - param.ds_numel)


def get_partition_rank(param: Any) -> int:
    return param.ds_owner.communicator.rank


def get_partition_dp_group(param: Any) -> Any:
    return param.ds_process_group


def convert_to_zero_parameters(param: Any, param_list: Iterable[nn.Parameter]) -> None:
    """Partition ordinary parameters that were added after ``zero.Init`` (adapters) like ``param``, each in its own
    dtype. Collective."""
    shard_like_this = getattr(param.ds_owner, "shard_like_this", None)
    if shard_like_this is None:
        raise ZeRORuntimeException(
            "convert_to_zero_parameters: this parameter already belongs to an engine; add parameters to the "
            "model before deepspeed.initialize(), which partitions them"
        )
    for each in param_list:
        if not is_zero_param(each):
            shard_like_this(each)


class MultipleAllGatherHandles:
    """Several all-gathers behind one handle: ``wait`` waits for all of them.

    Args:
        handles: objects with a ``wait`` method, with or without a ``handle_dependency`` argument.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = list(handles)

    def wait(self, handle_dependency: bool = True) -> None:
        for handle in self.handles:
            parameters = inspect.signature(handle.wait).parameters
            takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            if takes_any or "handle_dependency" in parameters:
                handle.wait(handle_dependency=handle_dependency)
            else:
                handle.wait()


def all_gather_coalesced(
    param: Any, params: Iterable[Any], safe_mode: bool = False, quantize: bool = False
) -> MultipleAllGatherHandles:
    """Gather ``params``, which stay whole until ``partition`` is called. Done on return. Collective."""
    all_gather(param, params)
    return MultipleAllGatherHandles([])


def all_gather(
    param: Any, param_list: Any = None, async_op: bool = False, hierarchy: int = 0
) -> MultipleAllGatherHandles | None:
    """Gather this parameter, or those of ``param_list``; they stay whole until ``partition`` is called. Collective.

    The gather is synchronous: with ``async_op`` the returned handle has nothing to wait for.
    """
    for each in param_list if param_list is not None else [param]:
        if getattr(each, GATHERED_ALONE, False):
            continue
        setattr(each, GATHERED_ALONE, True)
        sync_shard_dtype(each)
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.empty(each.ds_shape, dtype=each.dtype, device=each.device)
            each.ds_owner.read_param(each.ds_position, whole)
            if each.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                each.data = whole
                each.ds_status = ZeroParamStatus.AVAILABLE
    return MultipleAllGatherHandles([]) if async_op else None


def partition(
    param: Any,
    param_list: Any = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """Drop the whole parameter, after writing changes to the shards if ``has_been_updated``.

    ``free_data=False`` leaves the memory to the caller.
    """
    for each in param_list if param_list is not None else [param]:
        vars(each).pop(GATHERED_ALONE, None)
        if each.ds_status is not ZeroParamStatus.AVAILABLE:
            continue
        if has_been_updated:
            sync_shard_dtype(each)
            each.ds_owner.write_param(each.ds_position, each.data)
        reattach = getattr(each.ds_owner, "reattach", None)
        if reattach is not None and reattach(each.ds_position):
            continue  # whole because of another holder
        each.ds_status = ZeroParamStatus.NOT_AVAILABLE
        if free_data:
            each.data = torch.empty(0, dtype=each.dtype, device=each.device)


def ds_summary(param: Any, use_debug_name: bool = False) -> dict[str, Any]:
    return {
        "id": param.ds_id,
        "status": param.ds_status.name,
        "numel": param.numel(),
        "ds_numel": param.ds_numel,
        "shape": tuple(param.shape),
        "ds_shape": tuple(param.ds_shape),
        "requires_grad": param.requires_grad,
        "grad_shape": tuple(param.grad.shape) if param.grad is not None else None,
        "persist": param.ds_persist,
        "active_sub_modules": param.ds_active_sub_modules,
        "ds_tensor.shape": tuple(param.ds_tensor.shape),
    }


_METHODS = (
    all_gather, all_gather_coalesced, aligned_size, convert_to_zero_parameters, ds_summary, get_partition_dp_group,
    get_partition_rank, padding_size, partition, partition_numel,
)  # fmt: skip

_ATTRIBUTES = (
    CHECKS_WRITES, GATHERED_ALONE, GATHER_COUNT, _DEEPCOPY, "ds_active_sub_modules", "ds_owner", "ds_id", "ds_numel",
    "ds_numel_aligned", "ds_param_type", "ds_persist", "ds_position", "ds_process_group", "ds_secondary_tensor",
    "ds_shape", "ds_status", "ds_tensor", "ds_zero_param_process_group", "ds_zero_partition_rank",
    "ds_zero_partition_world_size", *(method.__name__ for method in _METHODS),
)  # fmt: skip
