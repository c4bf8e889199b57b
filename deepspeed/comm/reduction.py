"""Arithmetic of all reductions: sums in rank order, in fp32 for 16-bit inputs, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.ops.native import reduce_chunks


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp64 and integers keep their own, all others use fp32."""
    return dtype if dtype == torch.float64 or not dtype.is_floating_point else torch.float32


def sum_in_order(output: Tensor, inputs: Sequence[Tensor], scale: float = 1.0) -> None:
    """Compute `output = round((inputs[0] + inputs[1] + ...) * scale)` elementwise, summed from left to right.

    All are 1-D, contiguous and of equal length; `output` may be one of the inputs. The result is bitwise independent
    of how a tensor is split into calls.
    """
    if scale != 1.0 and not accumulation_dtype(inputs[0].dtype).is_floating_point:
        raise ValueError(f"scale={scale} with dtype {inputs[0].dtype}: integers can only be summed (scale=1)")
    reduce_chunks(output, inputs, scale)


def sum_in_blocks(
    output: Tensor, inputs: Sequence[Tensor], blocks: Sequence[Sequence[int]], scale: float = 1.0
) -> None:
    """Sum with `sum_in_order` within each block of inputs, unrounded, then over the blocks. With one block, or blocks
    of one, this equals `sum_in_order`."""
    if len(blocks) == 1 or len(blocks) == len(inputs):
        sum_in_order(output, inputs, scale)
        return
    sums = torch.empty(
        (len(blocks), output.numel()), dtype=accumulation_dtype(inputs[0].dtype), device=output.device
    )
    for total, block in zip(sums, blocks, strict=True):
        sum_in_order(total, [inputs[index] for index in block])
    sum_in_order(output, list(sums), scale)
