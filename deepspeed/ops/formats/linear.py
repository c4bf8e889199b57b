"""Products with frozen weights that are stored in few bits, in host memory, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def frozen_linear(input: Tensor, values: Callable[[Tensor], Tensor], bias: Tensor | None = None) -> Tensor:
    """Compute ``functional.linear`` [.., outputs] with a weight that gets no gradient.

    ``values`` returns the weight [outputs, inputs] in the dtype and on the device of a given tensor. Backward calls it
    again, so no materialized weight is kept in between.
    """
    if not (torch.is_grad_enabled() and input.requires_grad):
        return functional.linear(input, values(input), bias)
    return _FrozenLinear.apply(input, values, bias)  # pyright: ignore[reportReturnType]


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, values: Callable[[Tensor], Tensor], bias: Tensor | None) -> Tensor:
        ctx.values = values
        return functional.linear(input, values(input), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ ctx.values(grad), None, grad_bias
