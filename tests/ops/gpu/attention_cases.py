"""Cases shared by the tests of attention kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.ops.gpu.triton_kit import CAPABILITIES, built

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
"""Of values of about 1, against fp64: sums in fp32 of products of the dtype, then one rounding (the interpreter
truncates where a GPU rounds)."""


def drawn(*shape: int, dtype: torch.dtype = torch.float32, gradient: bool = True) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(gradient)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, name: str = "") -> None:
    """Relative to the largest number of ``expected``, as an error is of the largest terms of a sum."""
    assert found.shape == expected.shape, name
    error = (found.double() - expected.double()).abs().max()
    largest = max(1.0, float(expected.detach().abs().max()))
    assert error <= TOLERANCE[dtype] * largest, f"{name}: {float(error):.2e} of {largest:.2e}"


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Dense, in fp64: [.., rows, size]. A row that sees nothing gives zeros."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.mT * scale + bias
    top = scores.amax(-1, keepdim=True).detach()
    weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0) @ v


def built_everywhere(launching: Callable[[], Any]) -> set[str]:
    """As `built`, and also for GPUs with the least shared memory that Triton's kernels are used on: sm_86 and sm_89."""
    with mock.patch.dict(CAPABILITIES, {89: 99 * 1024}):
        return built(launching, tuple(CAPABILITIES))
