"""Where tokens from several ranks go, so that each expert's lie together and begin at a multiple of a size."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["fill_indices_cpu", "fill_indices_wrapper", "generate_permute_indices", "indices_padding_wrapper"]

ALIGNMENT = 8
"""Rows, of which products of 8- and 16-bit matrices want multiples."""


def fill_indices_cpu(
    tokens_per_expert_group: Tensor,
    start_index_values: Tensor,
    write_offsets: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
) -> Tensor:
    """[max_len] int32: which token comes to each place, -1 for none.

    Args:
        tokens_per_expert_group: [ranks x experts], tokens that each rank sent to each of this rank's experts.
        start_index_values: [ranks x experts], where they lie.
        write_offsets: [experts], where each expert's places begin.
    """
    by_expert = (num_ranks, experts_per_rank)
    counts = tokens_per_expert_group.view(by_expert).t().long()
    starts = start_index_values.view(by_expert).t().long()
    places = counts.cumsum(1) - counts + write_offsets.long()[:, None]
    lengths = counts.reshape(-1)
    within = torch.arange(int(lengths.sum()), device=lengths.device)
    within -= (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    found = torch.full((max_len,), -1, dtype=torch.int32, device=lengths.device)
    target = places.reshape(-1).repeat_interleave(lengths) + within
    found[target] = (starts.reshape(-1).repeat_interleave(lengths) + within).to(torch.int32)
    return found


def fill_indices_wrapper(
    tokens_per_expert_group: Tensor,
    start_index_values: Tensor,
    write_offsets: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    block_size: int = 128,
    max_blocks: int = 1024,
) -> Tensor:
    """The same, on the device of the tensors; the sizes of blocks have no effect."""
    return fill_indices_cpu(
        tokens_per_expert_group, start_index_values, write_offsets, experts_per_rank, num_ranks, max_len
    )


def generate_permute_indices(
    tokens_per_expert_group: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
    use_cpu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``fill_indices_cpu``'s, with each expert's number of places [experts] int32, a multiple of ``alignment`` and not
    0, and where these end."""
    counts = tokens_per_expert_group
    totals = counts.view(num_ranks, -1).sum(0).clamp(min=1)
    sizes = (totals + alignment - 1).div(alignment, rounding_mode="floor") * alignment
    ends = sizes.cumsum(0)
    indices = fill_indices_cpu(
        counts, counts.cumsum(0) - counts, ends - sizes, experts_per_rank, num_ranks, max_len
    )
    return indices, sizes.to(torch.int32), ends.to(torch.int32)


def indices_padding_wrapper(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``func(w1, w2, w3, x, num_tokens_per_expert)`` for tokens in the order of the ranks that sent them: it is called
    with each expert's together and rows of zeros between them, and the result is in the order of ``x`` again."""

    @functools.wraps(func)
    def padded(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        experts = len(w1)
        ranks = num_tokens_per_expert.numel() // experts
        places = len(x) + experts * ALIGNMENT
        indices, sizes, _ = generate_permute_indices(num_tokens_per_expert, experts, ranks, places, ALIGNMENT)
        filled = (indices >= 0).nonzero().squeeze(1)
        tokens = indices[filled].long()
        rows = x.new_zeros(places, x.shape[1]).index_copy(0, filled, x[tokens])
        outputs = func(w1, w2, w3, rows, sizes)
        return outputs.new_zeros(len(x), outputs.shape[1]).index_copy(0, tokens, outputs[filled])

    return padded
