"""Documented helpers for tuples and lists of tensors: leaves of new graphs, alignment, gathering of flat groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor


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


def align_dense_tensors(tensor_list: Sequence[Tensor], alignment: int) -> list[Tensor]:
    """The flat tensors, followed by zeros if their total number of elements is not a multiple of `alignment`."""
    missing = get_alignment_padding(tensor_list, alignment)
    return [*tensor_list, tensor_list[0].new_zeros(missing)] if missing else list(tensor_list)


def all_gather_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """Fill each flat tensor from the ranks' slices of it, `allgather_bucket_size` elements of all ranks at a time.

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
