"""Taking tokens out of a decoder's activations and putting them back, row by row: the plain form of
``deepspeed.ops.random_ltd.dropping_utils``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def bsh_decoder_gather(
    reserved_length: int, hidden_states: Tensor, mask: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Random tokens of each row of ``hidden_states`` [batch, tokens, hidden]: they [batch, reserved, hidden], their
    ascending indices by row, and the part of a causal ``mask`` [batch or 1, 1, tokens, tokens] that fits."""
    indices = [
        torch.randperm(row.shape[0], device=row.device)[:reserved_length].sort().values
        for row in hidden_states
    ]
    part = torch.stack([row[kept] for row, kept in zip(hidden_states, indices, strict=True)])
    return part, indices, mask[:, :, :reserved_length, :reserved_length]


def bsh_decoder_scatter(
    hidden_states: Tensor, part_hidden_states: Tensor, rand_list: Sequence[Tensor]
) -> Tensor:
    """``hidden_states`` [batch, tokens, hidden], in place, with ``part_hidden_states`` at the tokens of each row."""
    for row, part, kept in zip(hidden_states, part_hidden_states, rand_list, strict=True):
        row[kept] = part
    return hidden_states
