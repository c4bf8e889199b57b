"""The experts of a layer that one rank holds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.numbered import NumberedModules
from deepspeed.checkpoint.placement import ATTRIBUTE, number_experts
from deepspeed.zero.replica_groups import DIVIDED

_MARKS = (ATTRIBUTE, "tensor_model_parallel", "model_parallel", "partition_dim", "partition_stride")
"""What tensor-parallel layers write on their parameters, and a copy of a parameter loses."""


class Experts(nn.Module):
    """``num_local_experts`` copies of ``expert``, of which the documented marks say that they are spread over ranks.

    ``expert_group_name``: "ep_size_N", where N ranks share the experts of the layer.
    """

    def __init__(
        self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None
    ) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts
        self.deepspeed_experts = NumberedModules(_copy(expert) for _ in range(num_local_experts))
        for param in self.deepspeed_experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = expert_group_name  # type: ignore[attr-defined]

    def take_place(self, number: int, count: int) -> None:
        """These are the experts of rank ``number`` of the ``count`` that share the layer's."""
        each = self.num_local_experts
        self.deepspeed_experts.renumber(number * each, count * each)
        if count > 1:
            number_experts(self.deepspeed_experts.parameters())

    def divide_tokens(self, divide: bool) -> None:
        """Set whether tensor-parallel ranks, which hold copies of these experts, each take a part of the tokens."""
        for param in self.deepspeed_experts.parameters():
            setattr(param, DIVIDED, divide)

    def forward(self, inputs: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Each expert's outputs, in the shape and order of the inputs.

        Args:
            inputs: [tokens, hidden] sorted by expert, if ``counts`` says how many each gets; otherwise the documented
                [ranks, experts, capacity, hidden].
        """
        if counts is None:
            chunks = inputs.chunk(self.num_local_experts, dim=1)
            return torch.cat(
                [_output(e(c)) for e, c in zip(self.deepspeed_experts, chunks, strict=True)], dim=1
            )
        if len(counts) == 1:
            return _output(self.deepspeed_experts[0](inputs))
        # Also an expert without tokens is called: its weights get zeros as gradients, and ranks stay in step.
        chunks = inputs.split(list(counts))
        return torch.cat([_output(e(c)) for e, c in zip(self.deepspeed_experts, chunks, strict=True)])


def _copy(expert: nn.Module) -> nn.Module:
    made = copy.deepcopy(expert)
    for new, old in zip(made.parameters(), expert.parameters(), strict=True):
        for mark in _MARKS:
            if hasattr(old, mark):
                setattr(new, mark, getattr(old, mark))
    return made


def _output(result: Any) -> Tensor:
    """Experts may return more than their output (a bias that was not added), which is left alone as documented."""
    return result[0] if isinstance(result, tuple) else result
