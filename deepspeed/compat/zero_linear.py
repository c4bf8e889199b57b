"""Documented linear layer of stage 3. Here every ``nn.Linear`` saves only its input for backward, which gathers the
weight again, so these are torch's own operations under the documented names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LinearFunctionForZeroStage3(torch.autograd.Function):
    """``input @ weight.T + bias`` that saves the input and the weight itself for backward, not a view or copy."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, bias = (*inputs, None)[:3]
        ctx.save_for_backward(input, weight)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        input, weight = ctx.saved_tensors
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        grad_input = grad_output @ weight if ctx.needs_input_grad[0] else None
        grad_weight = rows.t() @ input.reshape(-1, input.shape[-1]) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias


def zero3_linear_wrap(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear``, with the same casts of operands under autocast."""
    device = input.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = bias.to(dtype) if bias is not None else None
    return LinearFunctionForZeroStage3.apply(input, weight, bias)  # type: ignore[return-value]


class LinearModuleForZeroStage3(nn.Linear):
    """``nn.Linear`` on top of ``zero3_linear_wrap``."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)

    def forward(self, input: Tensor) -> Tensor:
        return zero3_linear_wrap(input, self.weight, self.bias)
