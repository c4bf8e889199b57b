"""Low-bit integers in groups, with a scale and possibly an offset per group.

Groups lie along the last dim; per-group parameters have length 1 there. With b bits and q = 2**b:

    symmetric    s * clamp(round(x / s), -q/2, q/2 - 1)              s = 2 max|x| / q
      narrow     s * clamp(round(x / s), 1 - q/2, q/2 - 1)           s = max|x| / (q/2 - 1)
    asymmetric   s * clamp(round((x - z) / s), 0, q - 1) + z         s = (max x - min x) / q, z = s round(min x / s)
      from least s * clamp(round((x - z) / s), 0, q - 1) + z         s = (max x - min x) / (q - 1), z = min x
    ternary      a * sign(x) where |x| > 0.7 mean|x|, else 0         a = mean|x| of these (Li et al. 2016)
    binary       mean|x| * (1 where x >= 0, else -1)                 (Rastegari et al. 2016)

A group without a spread (all zeros; all equal, if asymmetric) has scale 0 and is kept unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]
"""Rounds quotients to integers in place."""


def nearest(values: Tensor) -> Tensor:
    """Round to nearest, ties to even. In place."""
    return values.round_()


def stochastic(generator: torch.Generator | None = None) -> Rounding:
    """Make a rounding to one of the two neighbours that is unbiased."""

    def rounded(values: Tensor) -> Tensor:
        return values.add_(torch.rand(values.shape, generator=generator, device=values.device)).floor_()

    return rounded


def symmetric_levels(
    groups: Tensor,
    bits: int,
    largest: Tensor | None = None,
    rounding: Rounding = nearest,
    *,
    narrow: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (integers in fp32 [.., n], scales [.., 1]) of fp32 ``groups`` [.., n]; value = integer * scale.

    ``largest``: magnitudes [.., 1] to use instead of the groups' own; ``narrow``: a symmetric integer range.
    """
    half = 2 ** (bits - 1)
    if largest is None:
        largest = groups.abs().amax(dim=-1, keepdim=True)  # several times faster than a norm
    scale = largest / (half - 1 if narrow else half)
    levels = rounding(groups / divisors(scale))
    return levels.clamp_(1 - half if narrow else -half, half - 1), scale


def asymmetric_levels(
    groups: Tensor,
    bits: int,
    low: Tensor | None = None,
    high: Tensor | None = None,
    rounding: Rounding = nearest,
    *,
    from_least: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (integers in fp32 [.., n], scales, offsets [.., 1]) of fp32 ``groups`` [.., n]; value = integer * scale +
    offset.

    ``low``, ``high``: a range [.., 1] to use instead of the groups' own. ``from_least``: the integers span exactly that
    range; otherwise offsets are multiples of the scale, so that 0 is representable.
    """
    if low is None or high is None:
        low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    if from_least:
        scale, offset = (high - low) / (2**bits - 1), low
    else:
        scale = (high - low) / 2**bits
        offset = torch.where(scale == 0, low, (low / divisors(scale)).round_() * scale)
    return levels_above(groups, bits, scale, offset, rounding), scale, offset


def levels_above(
    groups: Tensor, bits: int, scale: Tensor, offset: Tensor, rounding: Rounding = nearest
) -> Tensor:
    """Return the integers of ``groups`` for a known scale and offset; see ``asymmetric_levels``."""
    return rounding((groups - offset).div_(divisors(scale))).clamp_(0, 2**bits - 1)


def ternary_levels(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return (-1, 0 and 1 in fp32 [.., n], scales [.., 1])."""
    sizes = groups.abs()
    kept = sizes > 0.7 * sizes.mean(dim=-1, keepdim=True)
    scale = (sizes * kept).sum(dim=-1, keepdim=True) / kept.sum(dim=-1, keepdim=True).clamp_min(1)
    return groups.sign() * kept, scale


def binary_levels(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return (-1 and 1 in fp32 [.., n], scales [.., 1])."""
    return torch.where(groups >= 0, 1.0, -1.0), groups.abs().mean(dim=-1, keepdim=True)


def divisors(scale: Tensor) -> Tensor:
    """Return ``scale``, with 1 where it is 0 or NaN: non-finite values stay non-finite through the scale."""
    return torch.where(scale > 0, scale, 1.0)
