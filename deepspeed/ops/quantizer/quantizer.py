"""Rounds a tensor to few bits in groups and returns it in its own dtype, to see what quantizing it would do."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.ops.formats.integers import asymmetric_levels, nearest, stochastic, symmetric_levels


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
    rounding = stochastic() if sr else nearest
    if asym:
        levels, scale, least = asymmetric_levels(values, bit_num, rounding=rounding, from_least=True)
        rounded = levels * scale + least
    else:
        levels, scale = symmetric_levels(values, bit_num, rounding=rounding)
        rounded = levels * scale
    return input.copy_(rounded.view_as(input))
