"""Parts of a transformer layer that keep less for backward, and compute or derive the rest there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from deepspeed.ops.transformer.dropout import dropped, new_seed, runs_here
from deepspeed.ops.transformer.products import linear, of_linear


class InvertibleLayerNorm(torch.autograd.Function):
    """Layer norm that keeps its output, which the next product keeps anyway, and not its input: the normalized input is
    ``(output - bias) / weight``. A weight of exactly 0 cannot be inverted: its own gradient is 0 then, and so is its
    part in the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out, _, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(out, weight, bias, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        out, weight, bias, rstd = ctx.saved_tensors
        wide = torch.promote_types(out.dtype, torch.float32)
        grad, scale = grad.to(wide), weight.to(wide)
        normalized = (out.to(wide) - bias.to(wide)) / scale.masked_fill(scale == 0, torch.inf)
        scaled = grad * scale
        along = (scaled * normalized).mean(-1, keepdim=True)
        of_x = (scaled - scaled.mean(-1, keepdim=True) - normalized * along) * rstd.to(wide)
        rows = tuple(range(grad.dim() - 1))
        of_weight, of_bias = (grad * normalized).sum(rows), grad.sum(rows)
        return of_x.to(out.dtype), of_weight.to(weight.dtype), of_bias.to(bias.dtype), None


class GeluLinear(torch.autograd.Function):
    """``gelu(x) @ weight.T`` that keeps ``x`` and not ``gelu(x)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(functional.gelu(x), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        inner = functional.gelu(x) if needs[1] else x
        of_inner, of_weight = of_linear(grad, inner, weight, x_needs=needs[0], weight_needs=needs[1])
        of_x = None if of_inner is None else torch.ops.aten.gelu_backward(of_inner, x)
        return of_x, of_weight


class DroppedWeights(torch.autograd.Function):
    """``dropout(weights) @ value`` that keeps the weights, which the softmax keeps anyway, and not the result of the
    dropout: a seed says which were dropped, or where torch dropped them, a mask."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, ratio: float) -> Tensor:
        ctx.ratio, ctx.seed = ratio, new_seed() if runs_here(weights, ratio) else None
        if ctx.seed is not None:
            ctx.save_for_backward(weights, None, value)
            return dropped(weights, ratio, ctx.seed) @ value
        result, kept = torch.native_dropout(weights, ratio, True)
        ctx.save_for_backward(weights, kept, value)
        ctx.scale = 1.0 / (1.0 - ratio) if ratio < 1 else 0.0
        return result @ value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        weights, kept, value = ctx.saved_tensors
        of_value = of_weights = None
        if ctx.needs_input_grad[1]:
            of_value = _again(ctx, weights, kept).mT @ grad
        if ctx.needs_input_grad[0]:
            of_weights = _again(ctx, grad @ value.mT, kept)
        return of_weights, of_value, None


def _again(ctx: Any, x: Tensor, kept: Tensor | None) -> Tensor:
    """Apply the dropout of forward to ``x`` again."""
    if kept is None:
        return dropped(x, ctx.ratio, ctx.seed)
    return torch.ops.aten.native_dropout_backward(x, kept, ctx.scale)
