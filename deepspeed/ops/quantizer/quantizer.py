"""Rounds a tensor to few bits in groups and returns it in its own dtype, to see what quantizing it would do."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def ds_quantizer(
    input: Tensor, groups: int = 1, bit_num: int = 8, sr: bool = False, asym: bool = False
) -> Tensor:
    """``input`` as numbers of ``bit_num`` bits would hold it, written into it and returned.

    Each of ``groups`` equal runs of elements has a scale of its own. ``asym``: the 2**bit_num levels span its least to
    its greatest value, else they are spaced evenly around 0 up to its greatest absolute value. ``sr``: stochastic
    rounding, up with the probability of the fraction. ValueError: not that many equal groups, or bits.
    """
    if groups < 1 or input.numel() % groups:
        raise ValueError(
            f"groups={groups}: a tensor of {input.numel()} elements has no such number of equal groups"
        )
    if not 1 <= bit_num <= 16:
        raise ValueError(f"bit_num={bit_num}: expected 1 to 16")
    values = input.float().reshape(groups, -1)
    levels = 2**bit_num
    if asym:
        low, high = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
        step = _step((high - low) / (levels - 1))
        rounded = _round((values - low) / step, stochastic=sr).clamp(0, levels - 1) * step + low
    else:
        step = _step(2 * values.abs().amax(dim=1, keepdim=True) / levels)
        rounded = _round(values / step, stochastic=sr).clamp(-levels // 2, levels // 2 - 1) * step
    return input.copy_(rounded.view_as(input))


def _step(size: Tensor) -> Tensor:
    """1 where a group has only one value, which any step keeps."""
    return torch.where(size == 0, torch.ones_like(size), size)


def _round(values: Tensor, *, stochastic: bool) -> Tensor:
    return torch.floor(values + torch.rand_like(values)) if stochastic else torch.round(values)
