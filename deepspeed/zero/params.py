"""The ``ds_*`` attributes that clients read on partitioned parameters; the only place that writes them.

A partitioned parameter has an *owner*: the bucket that holds its shards, or, between ``zero.Init`` and
``initialize``, its own shard. All access from outside goes through the owner.
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
from deepspeed.base.sharded import full_numel, full_shape, is_zero_param


class ZeroParamStatus(enum.Enum):
    """Status of a parameter: whether the whole of it is in memory; one per parameter, following the status of its
    owner.
    """

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
    """Owner of the shards of a partitioned parameter; ``position`` identifies the parameter there."""

    communicator: Any
    """Of the ranks that together hold the parameter."""
    all_ranks: Any
    """Of all ranks that hold a copy of it."""
    alone: bool
    """Whether the parameter is sharded by itself, by ``zero.Init``: no engine has it yet."""

    def local_part(self, position: int) -> Tensor: ...
    def read_param(self, position: int, out: Tensor) -> None: ...
    def write_param(self, position: int, value: Tensor) -> None: ...


GATHER_COUNT = "_ds_gather_count"
"""Attribute of a parameter: how many ``GatheredParameters`` blocks it is open in."""

CHECKS_WRITES = "_ds_checks_writes"
"""Attribute of a parameter: whether changes that ``GatheredParameters`` would drop are errors."""

_ids = itertools.count()
_DEEPCOPY = "__deepcopy__"

_ATTRIBUTES = (
    CHECKS_WRITES, GATHER_COUNT, _DEEPCOPY, "ds_active_sub_modules", "ds_owner", "ds_id", "ds_numel",
    "ds_numel_aligned", "ds_param_type", "ds_persist", "ds_position", "ds_process_group",
    "ds_secondary_tensor", "ds_shape", "ds_status", "ds_tensor", "ds_zero_param_process_group",
    "ds_zero_partition_rank", "ds_zero_partition_world_size", "all_gather", "all_gather_coalesced",
    "aligned_size", "convert_to_zero_parameters", "ds_summary", "get_partition_dp_group",
    "get_partition_rank", "padding_size", "partition", "partition_numel",
)  # fmt: skip


def is_cast(tensor: Tensor) -> bool:
    """Return whether a dtype for the model is meant for this tensor: not for integers, nor for quantized values, such
    as frozen weights in 8 bits, which are nothing without their scales."""
    return tensor.is_floating_point() and (tensor.itemsize > 1 or tensor.requires_grad)


def convert(param: nn.Parameter, owner: ShardOwner, position: int) -> None:
    """Mark a whole parameter as partitioned and held by ``owner``."""
    attributes: Any = param
    attributes.ds_shape = param.shape
    attributes.ds_numel = param.numel()
    attributes.ds_id = next(_ids)
    attributes.ds_param_type = ZeroParamType.PARTITIONED
    attributes.ds_persist = False
    attributes.ds_active_sub_modules = set()
    attributes.ds_secondary_tensor = attributes.ds_zero_param_process_group = None
    attributes.ds_status = ZeroParamStatus.AVAILABLE
    for method in (
        all_gather,
        all_gather_coalesced,
        aligned_size,
        convert_to_zero_parameters,
        ds_summary,
        get_partition_dp_group,
        get_partition_rank,
        padding_size,
        partition,
        partition_numel,
    ):
        setattr(param, method.__name__, MethodType(method, param))
    setattr(param, _DEEPCOPY, MethodType(_deepcopy, param))
    _assign_owner(param, owner, position)


def adopt(param: nn.Parameter, owner: ShardOwner, position: int) -> None:
    """Move a parameter, partitioned or not, into ``owner``."""
    if is_zero_param(param):
        _assign_owner(param, owner, position)
    else:
        shape = owner.views[position].shape  # type: ignore[attr-defined]
        convert(param, owner, position)
        attributes: Any = param
        attributes.ds_shape, attributes.ds_numel = shape, shape.numel()


def adopt_copy(param: nn.Parameter, original: nn.Parameter, owner: ShardOwner) -> None:
    """Make ``param``, which is empty, a partitioned parameter like ``original``, held by ``owner``."""
    convert(param, owner, 0)
    attributes: Any = param
    attributes.ds_shape, attributes.ds_numel = full_shape(original), full_numel(original)
    attributes.ds_status = ZeroParamStatus.NOT_AVAILABLE


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


def note_neighbours(param: nn.Parameter, near: Any, *, all_holders: bool) -> None:
    """Parameters are gathered from the ranks ``near`` alone (ZeRO++'s hpZ); ``all_holders``: those are all that hold
    one copy, so that what this rank gives them is its own part."""
    attributes: Any = param
    attributes.ds_zero_param_process_group = near
    attributes.ds_secondary_tensor = attributes.ds_tensor if all_holders else None


def mark(params: Iterable[nn.Parameter], status: ZeroParamStatus) -> None:
    for param in params:
        param.ds_status = status  # type: ignore[attr-defined]


def forget(param: nn.Parameter) -> None:
    """Make it an ordinary parameter again."""
    for name in _ATTRIBUTES:
        vars(param).pop(name, None)  # type: ignore[attr-defined]


def _deepcopy(param: Any, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` (``nn.TransformerEncoder`` creates its layers with it): if only this rank's shard exists, a
    parameter with its own shard. A whole one is copied as an ordinary parameter, which belongs to no engine."""
    copy_of = getattr(param.ds_owner, "copy_of", None)
    if copy_of is None or param.ds_status is not ZeroParamStatus.NOT_AVAILABLE:
        return nn.Parameter.__deepcopy__(param, memo)
    if id(param) not in memo:
        memo[id(param)] = copy_of(param)
    return memo[id(param)]


def follow_dtype(param: Any) -> None:
    """``module.double()`` and the like convert what is left of a partitioned parameter: convert its shard too."""
    cast = getattr(param.ds_owner, "cast", None)
    if cast is not None and param.ds_tensor.dtype != param.dtype:
        cast(param, param.dtype)


def read_full(param: Tensor, out: Tensor) -> None:
    """Copy the whole parameter into ``out``, which has its full shape. Collective if partitioned."""
    if is_zero_param(param):
        follow_dtype(param)
        param.ds_owner.read_param(param.ds_position, out)  # type: ignore[attr-defined]
    else:
        out.copy_(param.data)


# Documented methods of a partitioned parameter --------------------------------------------------------------


def make_whole(module: nn.Module) -> None:
    """Turn what ``zero.Init`` partitioned into ordinary parameters, for users that gather nothing. What a stage-3
    engine holds stays as it is. Collective."""
    held = [param for param in module.parameters() if is_zero_param(param) and vars(param)["ds_owner"].alone]
    for param in held:
        whole = torch.empty(full_shape(param), dtype=param.dtype, device=param.device)
        read_full(param, whole)
        forget(param)
        param.data = whole
    if held:
        log_dist(
            f"{len(held)} parameters, which zero.Init had partitioned, are whole: only stage 3 gathers",
            ranks=[0],
        )


def partition_numel(param: Any) -> int:
    """Elements of this rank's part."""
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
    """Partition ordinary parameters that were added to a model after ``zero.Init`` (adapters) as this one is, each in
    its own dtype. Collective."""
    shard_alike = getattr(param.ds_owner, "shard_alike", None)
    if shard_alike is None:
        raise ZeRORuntimeException(
            "convert_to_zero_parameters: this parameter already belongs to an engine; add parameters to the model "
            "before deepspeed.initialize(), which partitions those that are not"
        )
    for each in param_list:
        if not is_zero_param(each):
            shard_alike(each)


class MultipleAllGatherHandles:
    """Several gatherings as one: ``wait`` waits for all of them.

    Args:
        handles: each has a ``wait``, with or without ``handle_dependency``.
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
    """Make these parameters whole until ``partition`` is called; they are when this returns. Collective."""
    all_gather(param, params)
    return MultipleAllGatherHandles([])


def all_gather(
    param: Any, param_list: Any = None, async_op: bool = False, hierarchy: int = 0
) -> MultipleAllGatherHandles | None:
    """Make this parameter (or those of ``param_list``) whole until ``partition`` is called; with ``async_op`` there is
    something to wait for, though they are whole already. Collective."""
    for each in param_list if param_list is not None else [param]:
        if each.ds_status is ZeroParamStatus.NOT_AVAILABLE:
            follow_dtype(each)
            with torch.inference_mode(False), torch.no_grad():
                whole = torch.empty(each.ds_shape, dtype=each.dtype, device=each.device)
                each.ds_owner.read_param(each.ds_position, whole)
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
    """Write changes (``has_been_updated``) to the shards and drop the whole parameter; ``free_data=False`` leaves its
    memory to the caller."""
    for each in param_list if param_list is not None else [param]:
        if each.ds_status is not ZeroParamStatus.AVAILABLE:
            continue
        if has_been_updated:
            follow_dtype(each)
            each.ds_owner.write_param(each.ds_position, each.data)
        gathered = getattr(each.ds_owner, "views", None)
        if gathered and each.data_ptr() == gathered[each.ds_position].data_ptr():
            continue  # whole because others use it
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
