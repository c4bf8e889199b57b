"""Norms of rows, fused with the preceding dropout and residual addition, in one pass over memory.

Forward reads a row once and writes its sum and its norm. Backward reads the sum and the gradients once, and writes the
gradient of the sum, after dropout if there was any. Each program accumulates the gradients of weight and bias over its
own rows, and torch adds the few partial sums, so results are reproducible.
"""

# Kernels are Triton, not Python: the types of their arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops.gpu.dropout import arguments, kept
from deepspeed.ops.gpu.types import FLOATS

MAX_ROW = 8192
"""Maximum elements of a row: backward holds about eight of them in registers."""
_PROGRAMS = 256
"""Number of programs of backward."""


@triton.jit(do_not_specialize=["seed_low", "seed_high", "limit", "scale"])
def _norm_kernel(
    x,  # [rows, size]
    residual,  # [rows, size], or None
    weight,  # [size], or None
    bias,  # [size], or None
    total,  # [rows, size], or None: the sum that is normalized
    out,  # [rows, size]
    means,  # [rows] fp32, or None
    factors,  # [rows] fp32, or None: 1 / deviation
    size,
    eps,
    seed_low,
    seed_high,
    limit,
    scale,
    DROPS: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = row * size + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        value = tl.where(kept(at, seed_low, seed_high, limit), value * scale, 0.0)
    if residual is not None:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if total is not None:
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)  # the value that backward and later layers will read
    mean = tl.sum(value, 0) / size if CENTERED else 0.0
    deviation = tl.where(inside, value - mean, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(deviation * deviation, 0) / size + eps)
    result = deviation * factor
    if weight is not None:
        result *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
    if factors is not None:
        tl.store(factors + row, factor)
    if means is not None:
        tl.store(means + row, mean)


@triton.jit(do_not_specialize=["rows", "seed_low", "seed_high", "limit", "scale"])
def _backward_kernel(
    grad,  # [rows, size], of the norm
    grad_total,  # [rows, size], of the sum, or None
    total,  # [rows, size]
    weight,  # [size], or None
    means,  # [rows], or None
    factors,  # [rows]
    grad_residual,  # [rows, size], the gradient of the residual
    grad_x,  # [rows, size], or None: the same as of the residual
    grad_weight,  # [programs, size] fp32, or None
    grad_bias,  # [programs, size] fp32, or None
    rows,
    size,
    seed_low,
    seed_high,
    limit,
    scale,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < size
    weights = tl.full((BLOCK,), 1.0, tl.float32)
    if weight is not None:
        weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sums = tl.zeros((BLOCK,), tl.float32)
    bias_sums = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * size + column
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(factors + row)
        scaled = g * weights
        centre = 0.0
        if means is not None:
            value -= tl.load(means + row)
            centre = tl.sum(tl.where(inside, scaled, 0.0), 0) / size
        normed = tl.where(inside, value * factor, 0.0)
        along = tl.sum(scaled * normed, 0) / size
        result = (scaled - centre - normed * along) * factor
        if grad_total is not None:
            result += tl.load(grad_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_residual + at, result.to(grad_residual.dtype.element_ty), mask=inside)
        if grad_x is not None:
            part = tl.where(kept(at, seed_low, seed_high, limit), result * scale, 0.0)
            tl.store(grad_x + at, part.to(grad_x.dtype.element_ty), mask=inside)
        weight_sums += g * normed
        bias_sums += g
    place = tl.program_id(0).to(tl.int64) * size + column
    if grad_weight is not None:
        tl.store(grad_weight + place, weight_sums, mask=inside)
    if grad_bias is not None:
        tl.store(grad_bias + place, bias_sums, mask=inside)


def supports(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether there is a kernel for these dtypes and this row size."""
    kinds = {x.dtype, *(other.dtype for other in others if other is not None)}
    return kinds <= FLOATS.keys() and 0 < x.shape[-1] <= MAX_ROW


def norm(
    x: Tensor, weight: Tensor | None, *, residual: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return ``x`` plus ``residual``, and its rows divided by their root mean square, times the weight. Without
    gradients."""
    x = x.contiguous()
    total = None if residual is None else torch.empty_like(x)
    out, _, _ = _forward(x, residual, total, weight, None, eps, False, None)
    return (x if total is None else total), out


class AddedNorm(torch.autograd.Function):
    """``apply(x, residual, weight, bias, ratio, seed, eps, centered)`` -> (sum, norm of the sum), where the sum is
    ``x`` after dropout with probability ``ratio``, plus ``residual``. Saves the sum, which the next layer saves
    anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        ratio: float,
        seed: int,
        eps: float,
        centered: bool,
    ) -> tuple[Tensor, Tensor]:
        drops = (ratio, seed) if ratio > 0 else None
        x = x.contiguous()
        total = torch.empty_like(x)
        given = (x, residual, total, weight, bias)
        out, means, factors = _forward(*given, eps, centered, drops, keeps=True)
        ctx.save_for_backward(total, weight, bias, means, factors)
        ctx.drops = drops
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, grad: Tensor | None) -> Any:
        total, weight, bias, means, factors = ctx.saved_tensors
        size = total.shape[-1]
        rows = total.numel() // size if size else 0
        grad = torch.zeros_like(total) if grad is None else grad.contiguous()
        grad_residual = torch.empty_like(total)
        grad_x = None if ctx.drops is None else torch.empty_like(total)
        programs = max(1, min(_PROGRAMS, rows))
        sums = [
            None if each is None else torch.empty(programs, size, dtype=torch.float32, device=total.device)
            for each in (weight, bias)
        ]
        with torch.cuda.device_of(total):
            _backward_kernel[(programs,)](
                grad,
                None if grad_total is None else grad_total.contiguous(),
                total,
                weight,
                means,
                factors,
                grad_residual,
                grad_x,
                *sums,
                rows,
                size,
                *arguments(*(ctx.drops or (0.0, 0))),
                BLOCK=triton.next_power_of_2(size),
                num_warps=_warps(size),
            )
        grad_parameters = [
            None if given is None or made is None else made.sum(0).to(given.dtype)
            for given, made in zip((weight, bias), sums, strict=True)
        ]
        return (
            grad_residual if grad_x is None else grad_x,
            grad_residual if ctx.needs_input_grad[1] else None,
            *grad_parameters,
            *(None, None, None, None),
        )


def _forward(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    drops: tuple[float, int] | None,
    *,
    keeps: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the norm, means and factors. ``x`` must be contiguous."""
    size = x.shape[-1]
    rows = x.numel() // size
    out = torch.empty_like(x)
    factors = torch.empty(rows, dtype=torch.float32, device=x.device) if keeps else None
    means = torch.empty_like(factors) if factors is not None and centered else None
    if not rows:
        return out, means, factors
    with torch.cuda.device_of(x):
        _norm_kernel[(rows,)](
            x,
            None if residual is None else residual.contiguous(),
            weight,
            bias,
            total,
            out,
            means,
            factors,
            size,
            eps,
            *arguments(*(drops or (0.0, 0))),
            DROPS=drops is not None,
            CENTERED=centered,
            BLOCK=triton.next_power_of_2(size),
            num_warps=_warps(size),
        )
    return out, means, factors


def _warps(size: int) -> int:
    return 1 if size <= 512 else 4 if size <= 2048 else 8 if size <= 4096 else 16
