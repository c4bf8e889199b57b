"""Fake quantization and top-k masks with straight-through gradients (Bengio et al. 2013).

Values are quantized in groups of consecutive elements that share a scale: `num_groups` must divide their number. The
arithmetic is fp32 also for 16-bit tensors, and rounded once to their dtype: `deepspeed.ops.formats.integers`.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from deepspeed.ops.formats.integers import (
    Rounding,
    asymmetric_levels,
    binary_levels,
    nearest,
    stochastic,
    symmetric_levels,
    ternary_levels,
)

NEAREST, STOCHASTIC = "nearest", "stochastic"
SYMMETRIC, ASYMMETRIC = "symmetric", "asymmetric"


def seed_of(name: str) -> int:
    """Derive a 32-bit seed from a name: a module's random draws then do not depend on which other modules exist, so
    pipeline stages draw what a single process draws."""
    return zlib.crc32(name.encode())


def top_mask(scores: Tensor, ratio: float) -> Tensor:
    """Return a boolean mask, of the shape of `scores`, of the ceil(ratio * n) largest; ties go to the first."""
    flat = scores.detach().reshape(-1).float()
    count = math.ceil(ratio * flat.numel())
    if count <= 0 or count >= flat.numel():
        return torch.full_like(scores, count > 0, dtype=torch.bool)
    least = flat.kthvalue(flat.numel() - count + 1).values
    above, equal = flat > least, flat == least
    return (above | (equal & (equal.cumsum(0) <= count - above.sum()))).view(scores.shape)


class TopKBinarizer(Function):
    """A mask of the dtype of `inputs` (scores): 1 at the share `threshold` of largest scores, else 0 (Sanh et al.:
    Movement pruning, 2020). With `sigmoid`: 1 where sigmoid(score) > `threshold`. Scores get the mask's gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, threshold: float, sigmoid: bool) -> Tensor:
        if sigmoid:
            return (torch.sigmoid(inputs) > threshold).to(inputs.dtype)
        return top_mask(inputs, float(threshold)).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradOutput: Tensor) -> Any:
        return gradOutput, None, None


def _grouped(values: Tensor, num_groups: int) -> Tensor:
    if values.numel() % num_groups:
        raise ValueError(
            f"{values.numel()} values (shape {tuple(values.shape)}) cannot be quantized in {num_groups} groups of "
            "equal size: quantize_groups must divide their number"
        )
    return values.detach().reshape(num_groups, -1).float()


def _bound(value: Any, like: Tensor) -> Tensor | None:
    """Return a given end of the range as fp32 [groups, 1], or [1, 1] for all; None if not given."""
    if value is None:
        return None
    return torch.as_tensor(value, dtype=torch.float32, device=like.device).detach().reshape(-1, 1)


def _rounding(name: str, seed: int | None, like: Tensor) -> Rounding:
    if name != STOCHASTIC:
        return nearest
    return stochastic(None if seed is None else torch.Generator(like.device).manual_seed(seed))


class StraightThroughQuantizer(Function):
    """Quantizes values in groups; the gradient passes straight through.

    Arguments of `apply`: `min_value` and `max_value` fix the range (numbers, or one per group) instead of taking that
    of the values. `seed`: of stochastic rounding; None uses the default generator.

    ValueError: `num_groups` does not divide the number of values.
    """

    @classmethod
    def forward(
        cls,
        ctx: Any,
        input: Tensor,
        num_bits: int,
        min_value: Any = None,
        max_value: Any = None,
        num_groups: int = 1,
        rounding: str = NEAREST,
        seed: int | None = None,
    ) -> Tensor:
        groups = _grouped(input, num_groups)
        low, high = _bound(min_value, groups), _bound(max_value, groups)
        quantized = cls.rounded(groups, num_bits, low, high, _rounding(rounding, seed, groups))
        return quantized.to(input.dtype).view(input.shape)

    @staticmethod
    def rounded(groups: Tensor, bits: int, low: Tensor | None, high: Tensor | None, how: Rounding) -> Tensor:
        """Return `groups` [groups, values] quantized and dequantized."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        return grad_output[0], None, None, None, None, None, None


class SymQuantizer(StraightThroughQuantizer):
    """Quantizes symmetrically around zero, to `num_bits` bits."""

    @staticmethod
    def rounded(groups: Tensor, bits: int, low: Tensor | None, high: Tensor | None, how: Rounding) -> Tensor:
        largest = None if low is None or high is None else torch.maximum(low.abs(), high.abs())
        levels, scale = symmetric_levels(groups, bits, largest, how)
        return levels.mul_(scale)


class AsymQuantizer(StraightThroughQuantizer):
    """Quantizes asymmetrically, between the smallest and the largest value, to `num_bits` bits."""

    @staticmethod
    def rounded(groups: Tensor, bits: int, low: Tensor | None, high: Tensor | None, how: Rounding) -> Tensor:
        levels, scale, zero = asymmetric_levels(groups, bits, low, high, how)
        return levels.mul_(scale).add_(zero)


class TernaryQuantizer(StraightThroughQuantizer):
    """Quantizes to -a, 0 and a. `num_bits` (2), the range and the rounding are ignored."""

    @staticmethod
    def rounded(groups: Tensor, *_: Any) -> Tensor:
        levels, scale = ternary_levels(groups)
        return levels.mul_(scale)


class BinaryQuantizer(StraightThroughQuantizer):
    """Quantizes to -a and a. `num_bits` (1), the range and the rounding are ignored."""

    @staticmethod
    def rounded(groups: Tensor, *_: Any) -> Tensor:
        levels, scale = binary_levels(groups)
        return levels.mul_(scale)


def quantizer_for(bits: int, kind: str) -> type[StraightThroughQuantizer]:
    """Return the quantizer of weights to `bits`: ternary for two bits and binary for one, whatever the `kind`."""
    if bits <= 2:
        return TernaryQuantizer if bits == 2 else BinaryQuantizer
    if kind not in (SYMMETRIC, ASYMMETRIC):
        raise ValueError(f"quantization_type is {SYMMETRIC!r} or {ASYMMETRIC!r}, not {kind!r}")
    return SymQuantizer if kind == SYMMETRIC else AsymQuantizer
