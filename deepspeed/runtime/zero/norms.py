"""The gradient norm: one function for every stage, group and precision.

Squares are summed in fp64 and the root is rounded once to fp32, so the result does not depend on how gradients
are partitioned into buckets and across ranks; the clipping coefficient is then computed as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.ops.native import DEVICE_PIECE, sum_of_squares

__all__ = ["clip_coefficient", "first_non_finite", "norm_from_squares", "sum_of_squares"]


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
        pieces = tensor.detach().reshape(-1).split(DEVICE_PIECE)
        if not all(bool(torch.isfinite(piece).all()) for piece in pieces):
            return i
    return None
