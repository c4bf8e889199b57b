"""The gradient norm: one function for every stage, group and precision.

Squares are summed in fp64 and the root is rounded once to fp32, so the result does not depend on how gradients
are partitioned into buckets and across ranks; the clipping coefficient is then computed as torch does.

[Note: fp32 without tensors] A tensor of one element costs microseconds in every step. Python's floats are fp64: a sum,
product or quotient of two fp32 numbers computed in fp64 and rounded to fp32 is the one that fp32 arithmetic gives
(S. Figueroa: When is double rounding innocuous?, SIGNUM 1995: it is if 53 >= 2 x 24 + 2).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.ops.native import DEVICE_PIECE, sum_of_squares

_fp32 = ctypes.c_float  # its value is rounded to fp32; what is too large becomes inf
_EPS = _fp32(1e-6).value

__all__ = ["clip_coefficient", "first_non_finite", "norm_from_squares", "sum_of_squares"]


def norm_from_squares(total: float) -> float:
    """Root of a sum of squares, rounded once to fp32."""
    if not math.isfinite(total):
        return math.nan if math.isnan(total) else math.inf
    return _fp32(math.sqrt(total)).value


def clip_coefficient(norm: float, max_norm: float) -> float:
    """``min(1, max_norm / (norm + 1e-6))`` in fp32, as ``torch.nn.utils.clip_grad_norm_``; 1 if ``max_norm`` is 0."""
    if max_norm <= 0:
        return 1.0
    inverse = _fp32(
        1.0 / _fp32(_fp32(norm).value + _EPS).value
    ).value  # torch divides by a tensor in two roundings
    coefficient = _fp32(inverse * _fp32(max_norm).value).value
    return coefficient if coefficient < 1.0 or math.isnan(coefficient) else 1.0


def first_non_finite(tensors: Sequence[Tensor]) -> int | None:
    """Position of the first tensor with a NaN or Inf."""
    for i, tensor in enumerate(tensors):
        pieces = tensor.detach().reshape(-1).split(DEVICE_PIECE)
        if not all(bool(torch.isfinite(piece).all()) for piece in pieces):
            return i
    return None
