"""Documented helpers of gating functions, with which scripts write gates of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed.parallel.expert.routes import capacity_of, gumbel_noise

TUTEL_INSTALLED = False
exp_selection_uniform_map: dict[torch.device, Callable[..., Tensor]] = {}
"""Samplers that scripts keep by device."""


def gumbel_rsample(shape: Any, device: torch.device | str) -> Tensor:
    """Sample the standard Gumbel distribution, fp32 [shape]."""
    return gumbel_noise(torch.empty(shape, device=device))


def capacity(gates: Tensor, capacity_factor: Tensor | float, min_capacity: Tensor | int) -> Tensor:
    """Return ``ceil(S / E x capacity_factor)`` for ``gates`` [S, E], at least ``min_capacity``; int64 []."""
    tokens, experts = gates.shape
    return torch.tensor(capacity_of(tokens, experts, float(capacity_factor), int(min_capacity)))


def one_hot_to_float(x: Tensor, num_classes: Tensor | int) -> Tensor:
    """Return the one-hot rows of ``x``, fp32 [.., num_classes]."""
    return F.one_hot(x, num_classes=int(num_classes)).float()


def top_idx(source: Tensor, k: Tensor | int) -> Tensor:
    """Return the indices of the ``k`` largest values along dim 0."""
    return source.topk(int(k), dim=0).indices
