"""The gradient norm: one function for every stage, group and precision.

Squares are summed in fp64 and the root is rounded once to fp32, so the result does not depend on how gradients
are cut over ranks and buckets; the clipping coefficient is then computed as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.ops import native


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Sum of squares in fp64 of any mix of float dtypes; NaN or Inf when an element is."""
    if not tensors:
        return 0.0
    on_host = [t for t in tensors if t.device.type == "cpu"]
    total = native.sum_of_squares(on_host) if on_host else 0.0
    if len(on_host) < len(tensors):  # with Twin-Flow some are on the device
        total += float(sum(torch.sum(t.double().square()) for t in tensors if t.device.type != "cpu"))
    return total


def norm_from_squares(total: float) -> float:
    """Root of a sum of squares, rounded once to fp32."""
    if not math.isfinite(total):
        return math.nan if math.isnan(total) else math.inf
    return torch.tensor(math.sqrt(total), dtype=torch.float32).item()


def clip_coefficient(norm: float, max_norm: float) -> float:
    """``min(1, max_norm / (norm + 1e-6))`` in fp32, as ``torch.nn.utils.clip_grad_norm_``; 1 if ``max_norm`` is 0."""
    if max_norm <= 0:
        return 1.0
    coefficient = max_norm / (torch.tensor(norm, dtype=torch.float32) + 1e-6)
    return torch.clamp(coefficient, max=1.0).item()


def first_non_finite(tensors: Sequence[Tensor]) -> int | None:
    """Position of the first tensor with a NaN or Inf."""
    for i, tensor in enumerate(tensors):
        if not torch.isfinite(tensor).all():
            return i
    return None
