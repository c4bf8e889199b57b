"""The arithmetic of every reduction: sums in rank order, in fp32 for 16-bit inputs, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16  # elements summed at a time: the fp32 accumulator (256 KiB) stays in the cache


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 and integers are summed as they are, every other dtype in fp32."""
    return dtype if dtype == torch.float64 or not dtype.is_floating_point else torch.float32


def sum_in_order(output: Tensor, inputs: Sequence[Tensor], scale: float = 1.0) -> None:
    """`output = round((inputs[0] + inputs[1] + ...) * scale)` elementwise, summed from left to right.

    All are 1-D, contiguous and of one length; `output` may be one of the inputs. No bit depends on how a
    tensor is cut into calls.
    """
    count = output.numel()
    accumulator_dtype = accumulation_dtype(inputs[0].dtype)
    if scale != 1.0 and not accumulator_dtype.is_floating_point:
        raise ValueError(f"scale={scale} with dtype {inputs[0].dtype}: integers can only be summed (scale=1)")
    if len(inputs) == 2 and scale == 1.0 and inputs[0].dtype == output.dtype == accumulator_dtype:
        torch.add(inputs[0], inputs[1], out=output)
        return
    accumulator = torch.empty(min(count, _BLOCK), dtype=accumulator_dtype, device=output.device)
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        block = accumulator[: stop - start]
        block.copy_(inputs[0][start:stop])
        for summand in inputs[1:]:
            block.add_(summand[start:stop])
        if scale != 1.0:
            block.mul_(scale)
        output[start:stop].copy_(block)
