"""A warning where this processor has no instructions for the 16-bit products of a run."""

from __future__ import annotations

from functools import cache

import torch

from deepspeed.config.plan import PrecisionPlan

WIDTH = 192
"""Rows, columns and depth of the measured product: 0.1 ms where there are instructions, 5 ms where there are none."""
SLOWER = 3.0
"""Less is noise, or made up for by half the bytes that move."""


def slow_dtype_warning(precision: PrecisionPlan, device: torch.device) -> str | None:
    """Return what to tell a user whose 16-bit products take much longer than those in fp32 on this host; else None."""
    dtype = precision.products
    if device.type != "cpu" or dtype is None or dtype.itemsize != 2:
        return None
    factor = slowdown(dtype)
    if factor < SLOWER:
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"a product of matrices in {name} takes {factor:.0f} times as long as in float32 on this processor, which has "
        "no instructions for it: without the sections bf16, fp16 and torch_autocast (float32) a step is faster here"
    )


@cache
def slowdown(dtype: torch.dtype) -> float:
    """Return how many times longer a product in ``dtype`` takes on the host than in fp32. Takes milliseconds."""
    from deepspeed.observe.op_speed import seconds_of  # for those who train in 16 bits on a host

    def seconds(kind: torch.dtype) -> float:
        matrix = torch.ones(WIDTH, WIDTH, dtype=kind)
        return seconds_of(lambda: torch.mm(matrix, matrix), span=0.0)

    return seconds(dtype) / seconds(torch.float32)
