"""Activations of gated feed-forward parts: ``activation(gate) * up`` in one pass, with gradients."""

# Kernels are Triton, not Python: the types of their arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops.gpu.types import FLOATS
from deepspeed.ops.host_graph import Activation

_BLOCK = 1024
_SILU, _GELU, _GELU_TANH = (
    tl.constexpr(int(each)) for each in (Activation.SILU, Activation.GELU, Activation.GELU_TANH)
)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == _SILU:
        return x * tl.sigmoid(x)
    elif ACTIVATION == _GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == _GELU_TANH:  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def _gate_kernel(
    gate,  # rows of `size` elements, with stride `gate_stride`
    up,  # the same, or None
    out,  # [rows, size]
    size,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    parts = tl.cdiv(size, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    result = _activated(
        tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32), ACTIVATION
    )
    if up is not None:
        result *= tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(grad, gate, up, grad_gate, grad_up, numel, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    g = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + index, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + index, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(x)
    slope = share * (1.0 + x * (1.0 - share))
    tl.store(grad_gate + index, (g * y * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + index, (g * x * share).to(grad_up.dtype.element_ty), mask=inside)


def supports(gate: Tensor, up: Tensor | None = None) -> bool:
    """Return whether there is a kernel for these dtypes."""
    return gate.dtype in FLOATS and (up is None or up.dtype in FLOATS)


def gated(gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
    """Compute activation(gate) * up of [rows, size], in the dtype of the gate. Rows may have any stride. Without
    gradients."""
    gate = gate if gate.stride(1) == 1 else gate.contiguous()
    if up is not None and up.stride(1) != 1:
        up = up.contiguous()
    rows, size = gate.shape
    out = gate.new_empty(rows, size)
    if out.numel():
        with torch.cuda.device_of(gate):
            _gate_kernel[(rows * triton.cdiv(size, _BLOCK),)](
                gate,
                up,
                out,
                size,
                gate.stride(0),
                0 if up is None else up.stride(0),
                ACTIVATION=int(activation),
                BLOCK=_BLOCK,
                num_warps=4,
            )
    return out


class Swiglu(torch.autograd.Function):
    """``apply(gate, up)`` -> silu(gate) * up, in the dtype of the gate."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        size = gate.shape[-1] if gate.dim() else 1
        return gated(gate.view(-1, size), up.view(-1, size), Activation.SILU).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            with torch.cuda.device_of(gate):
                _swiglu_backward_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](
                    grad.contiguous(), gate, up, grad_gate, grad_up, gate.numel(), BLOCK=_BLOCK, num_warps=4
                )
        return grad_gate, grad_up
