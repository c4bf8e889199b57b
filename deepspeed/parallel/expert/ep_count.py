"""Counts of the tokens routed to each expert."""

from __future__ import annotations

import torch
from torch import Tensor


def count_tokens_per_expert(selected_experts_indices: Tensor, num_experts: int) -> Tensor:
    """[num_experts] int32, of choices of any shape."""
    return torch.bincount(selected_experts_indices.flatten(), minlength=num_experts).to(torch.int32)
