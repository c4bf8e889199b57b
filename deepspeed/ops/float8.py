"""A linear layer whose matrix products use 8-bit floating-point operands, in forward and in backward.

Inputs and weights are rounded to E4M3 (at most 448), gradients of outputs to E5M2 (at most 57,344), as in Micikevicius
et al.: FP8 formats for deep learning, 2022. Each tensor has one scale, the largest power of two with which its largest
value still fits, recomputed at each use: nothing is kept between steps or saved. A power of two scales exactly, so the
scale only decides which of the smallest values underflow.

Products accumulate in fp32. On devices without FP8 products, the same rounded values are multiplied in the dtype of the
input ("emulated"): the same results up to the order of summation, but no faster.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16
"""Devices multiply matrices whose sizes are multiples of this."""


class Scaled(NamedTuple):
    """The values are ``codes.float() * scale``; ``scale`` is a scalar tensor. NaN if any value was not finite."""

    codes: Tensor
    scale: Tensor


def scaled(values: Tensor, dtype: torch.dtype) -> Scaled:
    """Round ``values`` to ``dtype``, scaled by the largest power of two with which none exceeds its range."""
    limit = torch.finfo(dtype).max
    largest = values.abs().amax().float() if values.numel() else values.new_zeros((), dtype=torch.float32)
    fits = torch.frexp(limit / largest)[1] - 1
    exponent = torch.where(largest > 0, fits, 0).clamp(-120, 120).to(torch.int32)
    wide = values.to(_wide(values.dtype))
    codes = (wide * _power_of_two(exponent).to(wide.dtype)).to(dtype)
    return Scaled(codes, torch.where(largest.isfinite(), _power_of_two(-exponent), torch.nan))


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent exactly, built from its bits: ``exp2`` may be off by one."""
    return (exponent + 127 << 23).view(torch.float32)


def has_float8_products(device: torch.device) -> bool:
    """Return whether ``device`` has FP8 matrix products: NVIDIA GPUs from compute capability 8.9 on."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


class Rounded:
    """Cache of the last rounded input: consecutive layers with the same input tensor (queries, keys, values) share its
    codes, and backward keeps them once."""

    def __init__(self) -> None:
        self._of: Callable[[], Tensor | None] = lambda: None
        self._version = -1
        self._found: Scaled | None = None

    def rows(self, input: Tensor) -> Scaled:
        """Return the codes of ``input``, as rows [n, inputs]."""
        if torch.compiler.is_compiling() or input.is_inference():  # no side effects; no version counter
            return _rows(input)
        if self._found is None or self._of() is not input or self._version != input._version:
            self._found = _rows(input)
            self._of, self._version = weakref.ref(input, self._forget), input._version
        return self._found

    def _forget(self, _: Any) -> None:
        self._found = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Rounded:
        return Rounded()

    def __reduce__(self) -> Any:
        return Rounded, ()


def _rows(input: Tensor) -> Scaled:
    return scaled(input.detach().reshape(-1, input.shape[-1]), E4M3)


def float8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    emulate: bool,
    rounded: Rounded | None = None,
) -> Tensor:
    """Return ``input @ weight.T + bias`` [.., outputs] in the dtype of ``input``.

    Args:
        input: [.., inputs]. Its codes are saved for backward: one byte per value.
        weight: [outputs, inputs], any floating-point dtype. Backward rounds it again, so a gathered weight may be
            released between forward and backward.
        emulate: compute without the device's FP8 products.
        rounded: input cache shared with neighbouring layers.
    """
    codes, scale = _rows(input) if rounded is None else rounded.rows(input)
    out: Any = _Float8Linear.apply(input, codes, scale, weight, emulate)
    return out if bias is None else out + bias.to(out.dtype)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, codes: Tensor, scale: Tensor, weight: Tensor, emulate: bool
    ) -> Tensor:
        ctx.save_for_backward(codes, scale, weight)
        ctx.emulate, ctx.dtype = emulate, input.dtype
        matrix = scaled(weight, E4M3)
        out = _product(Scaled(codes, scale), Scaled(matrix.codes.t(), matrix.scale), input.dtype, emulate)
        return out.view(*input.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        codes, scale, weight = ctx.saved_tensors
        grad = scaled(grads[0].reshape(-1, grads[0].shape[-1]), E5M2)
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_input = _product(grad, scaled(weight, E4M3), ctx.dtype, ctx.emulate)
            grad_input = grad_input.view(*grads[0].shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[3]:
            transposed = Scaled(grad.codes.t(), grad.scale)
            grad_weight = _product(transposed, Scaled(codes, scale), weight.dtype, ctx.emulate)
        return grad_input, None, None, grad_weight, None


def _product(left: Scaled, right: Scaled, dtype: torch.dtype, emulate: bool) -> Tensor:
    """Return ``left @ right`` [m, n] in ``dtype``; the inner dim is zero-padded to whole tiles."""
    if emulate:
        wide = _wide(dtype)
        return ((left.codes.to(wide) @ right.codes.to(wide)) * (left.scale * right.scale).to(wide)).to(dtype)
    missing = -left.codes.shape[1] % ALIGNMENT
    rows, columns = _filled(left.codes, missing), _filled(right.codes.t(), missing)
    return torch._scaled_mm(rows, columns.t(), scale_a=left.scale, scale_b=right.scale, out_dtype=dtype)


def _filled(codes: Tensor, missing: int) -> Tensor:
    """Return the rows contiguous in memory, each followed by ``missing`` zeros."""
    if not missing:
        return codes.contiguous()
    filled = codes.new_zeros(codes.shape[0], codes.shape[1] + missing, dtype=torch.uint8)
    filled[:, : codes.shape[1]] = codes.contiguous().view(torch.uint8)
    return filled.view(codes.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for emulated products with a result of ``dtype``: codes are exact in it, and sums fit."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
