"""Groups of numbers as integers of a few bits with a scale, and perhaps an offset, for each group.

Groups lie along the last dimension; what belongs to a group has length 1 there. With b bits and q = 2**b:

    symmetric    s * clamp(round(x / s), -q/2, q/2 - 1)              s = 2 max|x| / q
      narrow     s * clamp(round(x / s), 1 - q/2, q/2 - 1)           s = max|x| / (q/2 - 1)
    asymmetric   s * clamp(round((x - z) / s), 0, q - 1) + z         s = (max x - min x) / q, z = s round(min x / s)
      from least s * clamp(round((x - z) / s), 0, q - 1) + z         s = (max x - min x) / (q - 1), z = min x
    ternary      a * sign(x) where |x| > 0.7 mean|x|, else 0         a = mean|x| of these (Li et al. 2016)
    binary       mean|x| * (1 where x >= 0, else -1)                 (Rastegari et al. 2016)

A group without a spread (all zeros; all equal, if asymmetric) has scale 0 and is kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]
"""Rounds quotients to integers, in place."""


def nearest(values: Tensor) -> Tensor:
    """Ties to even. In place."""
    return values.round_()


def stochastic(generator: torch.Generator | None = None) -> Rounding:
    """To one of the two neighbours so that the mean is right."""

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
    """(integers in fp32 [.., n], scales [.., 1]) of fp32 ``groups`` [.., n]; value = integer * scale.

    ``largest``: magnitudes [.., 1] instead of those of the groups; ``narrow``: no integer without a negative.
    """
    half = 2 ** (bits - 1)
    if largest is None:
        largest = groups.abs().amax(dim=-1, keepdim=True)  # several times as fast as a norm
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
    """(integers in fp32 [.., n], scales, offsets [.., 1]) of fp32 ``groups`` [.., n]; value = integer * scale + offset.

    ``low``, ``high``: a range [.., 1] instead of that of the groups. ``from_least``: integers go from its one end to
    the other; without it 0 is a value, as offsets are multiples of the scale.
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
    """The integers of ``groups`` by a scale and an offset that are known: ``asymmetric_levels``."""
    return rounding((groups - offset).div_(divisors(scale))).clamp_(0, 2**bits - 1)


def ternary_levels(groups: Tensor) -> tuple[Tensor, Tensor]:
    """(-1, 0 and 1 in fp32 [.., n], scales [.., 1])."""
    sizes = groups.abs()
    kept = sizes > 0.7 * sizes.mean(dim=-1, keepdim=True)
    scale = (sizes * kept).sum(dim=-1, keepdim=True) / kept.sum(dim=-1, keepdim=True).clamp_min(1)
    return groups.sign() * kept, scale


def binary_levels(groups: Tensor) -> tuple[Tensor, Tensor]:
    """(-1 and 1 in fp32 [.., n], scales [.., 1])."""
    return torch.where(groups >= 0, 1.0, -1.0), groups.abs().mean(dim=-1, keepdim=True)


def divisors(scale: Tensor) -> Tensor:
    """``scale``, and 1 where it is 0 or not a number: what is not finite stays so by the scale."""
    return torch.where(scale > 0, scale, 1.0)
