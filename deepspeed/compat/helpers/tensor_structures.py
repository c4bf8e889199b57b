"""Documented helpers for tensors in lists and dicts: sizes, comparison, alignment, gathering of flat groups."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor


def get_tensor_bytes(item: Any) -> int:
    """Bytes of all tensors in dicts, lists and tuples."""
    if isinstance(item, Tensor):
        return item.numel() * item.element_size()
    values = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return sum(map(get_tensor_bytes, values))


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Return whether two structures of dicts, lists and tuples have the same form and their tensors are equal
    elementwise.
    """
    if type(inputs1) is not type(inputs2):
        return False
    if isinstance(inputs1, Tensor):
        return inputs1.shape == inputs2.shape and torch.equal(inputs1, inputs2.to(inputs1.device))
    if isinstance(inputs1, dict):
        return inputs1.keys() == inputs2.keys() and all(
            compare_tensors_in_structures(value, inputs2[key]) for key, value in inputs1.items()
        )
    if isinstance(inputs1, (list, tuple)):
        return len(inputs1) == len(inputs2) and all(map(compare_tensors_in_structures, inputs1, inputs2))
    return inputs1 == inputs2


def detach_variable(inputs: Any, device: torch.device | str | None = None) -> tuple[Any, ...]:
    """Tensors of a tuple as leaves of new graphs that need gradients as they did, on ``device`` if given.

    TypeError: not a tuple.
    """
    if not isinstance(inputs, tuple):
        raise TypeError(
            f"detach_variable takes a tuple of tensors and other values, not a {type(inputs).__name__}"
        )

    def detached(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        moved = item if device is None else item.to(device=device)
        return moved.detach().requires_grad_(item.requires_grad)

    return tuple(map(detached, inputs))


def get_alignment_padding(tensor_list: Sequence[Tensor], alignment: int) -> int:
    """Elements that are missing until their total number is a multiple of `alignment`."""
    return -sum(tensor.numel() for tensor in tensor_list) % alignment


def maybe_loss_for_backward(value: Any) -> bool:
    """Return whether the value may be a loss: a one-element tensor with a graph."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None


def is_transformers_cache(obj: Any) -> bool:
    """Return whether this is a key-value cache of transformers (which is not imported to find out)."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(obj, module.Cache)


def align_dense_tensors(tensor_list: Sequence[Tensor], alignment: int) -> list[Tensor]:
    """The flat tensors, followed by zeros if their total number of elements is not a multiple of `alignment`."""
    missing = get_alignment_padding(tensor_list, alignment)
    return [*tensor_list, tensor_list[0].new_zeros(missing)] if missing else list(tensor_list)


def all_gather_into_tensor_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
) -> None:
    """Fill each flat tensor from the ranks' slices; `partitioned_param_groups[i][r]` is rank r's slice of it."""
    for flat, slices, group in zip(groups_flat, partitioned_param_groups, dp_process_group, strict=True):
        own = slices[torch.distributed.get_rank(group)]
        torch.distributed.all_gather_into_tensor(flat, own.clone(), group=group)


def all_gather_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """The same in pieces of at most `allgather_bucket_size` elements across all ranks.

    Pieces begin at multiples of `start_alignment_factor` elements of a slice.
    """
    for slices, group in zip(partitioned_param_groups, dp_process_group, strict=True):
        ranks, rank = len(slices), torch.distributed.get_rank(group)
        size = max(1, allgather_bucket_size // ranks)
        size = max(start_alignment_factor, size - size % start_alignment_factor)
        for begin in range(0, slices[rank].numel(), size):
            pieces = [part[begin : begin + size] for part in slices]
            torch.distributed.all_gather(pieces, pieces[rank].clone(), group=group)
    del groups_flat  # the slices are views of them
