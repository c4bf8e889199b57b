"""Experts with stacked weights by themselves, for layers of one's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.parallel.expert.grouped import grouped_linear

__all__ = ["GroupedExperts"]


class GroupedExperts(nn.Module):
    """``w2 (silu(w1 x) * w3 x)`` of each expert, for tokens that are sorted by expert.

    Weights [experts, outputs, inputs], uninitialized: ``w1`` and ``w3`` to ``hidden_dim``, ``w2`` back to ``dim``.

    Args:
        use_grouped_mm: no effect: there is one implementation, of runs of tokens.
        disable_triton_grouped_mm: never use the kernel of GPUs.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        use_grouped_mm: bool = True,
        disable_triton_grouped_mm: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.use_grouped_mm = use_grouped_mm
        self.disable_triton_grouped_mm = disable_triton_grouped_mm
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Of tokens [T, dim] in the dtype that is computed in; 0 for those behind the last expert's."""
        counts = [int(each) for each in num_tokens_per_expert.tolist()]
        used = sum(counts)
        if len(counts) != self.num_experts or used > len(x):
            raise ValueError(
                f"num_tokens_per_expert={counts} does not fit {self.num_experts} experts and {len(x)} tokens"
            )

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            stacked = weight.to(x.dtype).transpose(1, 2)
            return grouped_linear(rows, stacked, counts, triton=not self.disable_triton_grouped_mm)

        rows = x[:used]
        outputs = product(F.silu(product(rows, self.w1)) * product(rows, self.w3), self.w2)
        return F.pad(outputs, (0, 0, 0, len(x) - used))
