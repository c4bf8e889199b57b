"""Documented helpers around ZeRO: agreement between ranks, traversing structures, views of a flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import logger
from deepspeed.base.sharded import is_zero_param
from deepspeed.optim.elementwise import is_elementwise
from deepspeed.zero.params import ZeRORuntimeException

__all__ = [
    "ZeRORuntimeException",
    "apply_to_tensors_only",
    "assert_ints_same_as_other_ranks",
    "assert_lst_len_same_as_other_ranks",
    "defragment",
    "get_lst_from_rank0",
    "get_mapping_to_flat_buffer",
    "is_builtin_type",
    "is_zero_param",
    "is_zero_supported_optimizer",
    "isinstance_namedtuple",
]


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Return whether ZeRO knows that this optimizer is elementwise, so that it can step on shards."""
    return is_elementwise(optimizer)


def get_lst_from_rank0(lst: Sequence[int]) -> list[int]:
    """Rank 0's list of integers; the others' must have the same length."""
    device = get_accelerator().current_device_name()
    numbers = torch.tensor(list(lst), dtype=torch.int64, device=device)
    torch.distributed.broadcast(numbers, src=0)
    return numbers.tolist()


def assert_lst_len_same_as_other_ranks(lst: Sequence[int]) -> None:
    """RuntimeError on ranks whose list differs in length from rank 0's."""
    expected = get_lst_from_rank0([len(lst)])[0]
    if expected != len(lst):
        rank = torch.distributed.get_rank()
        raise RuntimeError(
            f"The list of rank {rank} has {len(lst)} items, and that of rank 0 has {expected}."
        )


def assert_ints_same_as_other_ranks(ints: Sequence[int]) -> None:
    """RuntimeError on ranks whose numbers differ from rank 0's."""
    expected = get_lst_from_rank0(ints)
    if expected != list(ints):
        rank = torch.distributed.get_rank()
        raise RuntimeError(
            f"Rank {rank} has {list(ints)}, and rank 0 has {expected}: these have to be equal."
        )


def is_builtin_type(obj: Any) -> bool:
    """Return whether the object is of a built-in Python type."""
    return type(obj).__module__ in ("__builtin__", "builtins")


def isinstance_namedtuple(obj: object) -> bool:
    """Return whether this is an instance of a named tuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def apply_to_tensors_only(
    function: Callable[[Tensor], Any], value: Any, warning_msg_fn: Callable[[Any], str] | None = None
) -> Any:
    """`value` with `function` applied to the tensors in its tuples, lists and dicts, which keep their types.

    Args:
        warning_msg_fn: Makes the warning to log for a leaf that is neither a tensor nor of a built-in type.
    """
    if isinstance_namedtuple(value):
        return type(value)(*(apply_to_tensors_only(function, item, warning_msg_fn) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(apply_to_tensors_only(function, item, warning_msg_fn) for item in value)
    if isinstance(value, dict):
        for key in value:  # in place: the dict may be of a subclass
            value[key] = apply_to_tensors_only(function, value[key], warning_msg_fn)
        return value
    if isinstance(value, Tensor):
        return function(value)
    if warning_msg_fn is not None and not is_builtin_type(value):
        logger.warning(warning_msg_fn(value))
    return value


def get_mapping_to_flat_buffer(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
    """(tensor, offset, elements) of each tensor when laid end to end."""
    mapping, offset = [], 0
    for tensor in tensors:
        mapping.append((tensor, offset, tensor.numel()))
        offset += tensor.numel()
    return mapping


def defragment(tensors: Sequence[Tensor]) -> Tensor:
    """One new flat buffer with the tensors end to end; each tensor's `data` becomes a view of it."""
    if not tensors:
        raise ValueError("defragment needs at least one tensor")
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) != 1:
        raise ValueError(
            f"defragment needs tensors of one dtype on one device, and got {sorted(map(str, kinds))}"
        )
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    for tensor, offset, numel in get_mapping_to_flat_buffer(tensors):
        tensor.data = flat[offset : offset + numel].view(tensor.shape)
    return flat
