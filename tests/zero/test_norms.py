"""The scalars of a step: computed without tensors, with the bits that tensors would give."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from deepspeed.ops import native
from deepspeed.zero.step import clip_coefficient, norm_from_squares

EXTREMES = [0.0, 1e-45, 1e-30, 0.99, 1.0, 3.4e38, 1e300, math.inf, math.nan]


def bits(value: float) -> bytes:
    return torch.tensor(value, dtype=torch.float64).numpy().tobytes() if value == value else b"nan"


def torch_norm(total: float) -> float:
    return torch.tensor(math.sqrt(total), dtype=torch.float32).item() if math.isfinite(total) else total


def torch_clip(norm: float, max_norm: float) -> float:
    """As in ``torch.nn.utils.clip_grad_norm_``."""
    return torch.clamp(max_norm / (torch.tensor(norm, dtype=torch.float32) + 1e-6), max=1.0).item()


def test_norm_and_clipping_have_the_bits_of_tensors() -> None:
    draw = random.Random(0)
    values = EXTREMES + [10.0 ** draw.uniform(-12, 12) for _ in range(2000)]
    for value in values:
        assert bits(norm_from_squares(value)) == bits(torch_norm(value))
    for value in values:
        for limit in (1.0, 0.1, 1e-3, 1e38, 1e308, 10.0 ** draw.uniform(-8, 8)):
            assert bits(clip_coefficient(value, limit)) == bits(torch_clip(value, limit)), (value, limit)
    assert clip_coefficient(5.0, 0.0) == 1.0


def test_a_kept_sum_follows_the_values_of_its_tensors() -> None:
    tensors: list[Tensor] = [torch.randn(n) for n in (1, 100, 4097)] + [torch.randn(33).bfloat16()]
    kept = native.SumOfSquares(tensors)
    for scale in (1.0, 3.0):
        torch._foreach_mul_(tensors, scale)
        assert kept() == native.sum_of_squares(tensors)
    strided = [*tensors, torch.randn(6, 5).t()]  # no kernel takes it
    assert native.SumOfSquares(strided)() == native.sum_of_squares(strided)
    assert native.SumOfSquares([])() == 0.0
