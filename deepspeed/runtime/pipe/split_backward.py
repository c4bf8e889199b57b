"""Backwards in two parts: gradients of inputs at once, those of the weights of linear layers when they are asked for.

The linear layers of a stage compute the same products as always, with the same bits, but the product for the weight is
put off: its two factors wait in a queue. Other layers do all of their backward at once. Cf. Qi et al.: Zero bubble
pipeline parallelism, ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.runtime.zero.scopes import SHARED_BY

Add = Callable[[int, Tensor], None]
"""Takes a gradient: the number of its parameter, and the value."""


class WeightQueue:
    """Factors of the gradients of weights, by micro-batch and chunk. ``active`` while a batch runs whose backwards are
    split."""

    def __init__(self, add: Add) -> None:
        self.add = add
        self.active = False
        self.part: tuple[int, int] = (-1, 0)
        """Micro-batch and chunk whose backward is running."""
        self.anchor = torch.zeros(
            (), requires_grad=True
        )  # backward also reaches layers whose input wants no gradient
        self._waiting: dict[tuple[int, int], list[tuple[int, int | None, Tensor, Tensor]]] = {}
        self._scratch: Tensor | None = None

    def put(self, weight: int, bias: int | None, inputs: Tensor, grad: Tensor) -> None:
        self._waiting.setdefault(self.part, []).append((weight, bias, inputs, grad))

    def compute(self, part: tuple[int, int]) -> None:
        """The gradients that wait for a micro-batch of a chunk, in the order in which its backward reached them."""
        for weight, bias, inputs, grad in self._waiting.pop(part, ()):
            rows = grad.reshape(-1, grad.shape[-1])
            columns = inputs.reshape(-1, inputs.shape[-1])
            self.add(weight, torch.mm(rows.t(), columns, out=self._memory_for(rows, columns)))
            if bias is not None:
                self.add(bias, rows.sum(0))

    def _memory_for(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The product's: each gradient is added up before the next is computed. New memory for each would be cleared by
        the system page by page."""
        shape = (rows.shape[1], columns.shape[1])
        numel, scratch = shape[0] * shape[1], self._scratch
        if scratch is None or scratch.numel() < numel or scratch.dtype != rows.dtype:
            self._scratch = scratch = rows.new_empty(numel)
        return scratch[:numel].view(shape)

    def clear(self) -> None:
        """At the end of a batch."""
        self._waiting.clear()
        self._scratch = None


class _LinearInTwoParts(torch.autograd.Function):
    """``inputs``: [..., in], ``weight``: [out, in], ``bias``: [out] or None, both detached."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        put: Callable[..., None],
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.put = put
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        (grad,) = grads
        ctx.put(inputs.detach(), grad)
        return None, (grad @ weight if ctx.needs_input_grad[1] else None), None, None, None


def split_linears(module: nn.Module, numbers: Mapping[int, int], queue: WeightQueue) -> list[nn.Linear]:
    """Let the linear layers of ``module`` put off gradients of weights while ``queue`` is active; returns them.

    ``numbers``: id of a trained parameter -> number. Left out: subclasses, weights with several uses or stages, and
    layers that are not trained as a whole.
    """
    uses: dict[int, int] = {}
    for own in module.modules():
        for param in own._parameters.values():
            uses[id(param)] = uses.get(id(param), 0) + 1
    found = []
    for own in module.modules():
        if type(own) is not nn.Linear or "forward" in vars(own):
            continue
        params = [own.weight, *([own.bias] if own.bias is not None else [])]
        plain = all(id(p) in numbers and uses[id(p)] == 1 and not hasattr(p, SHARED_BY) for p in params)
        if plain:
            vars(own)["forward"] = _forward_of(own, [numbers[id(p)] for p in params], queue)
            found.append(own)
    return found


def _forward_of(own: nn.Linear, numbers: list[int], queue: WeightQueue) -> Callable[[Tensor], Tensor]:
    weight, bias = numbers[0], numbers[1] if len(numbers) > 1 else None

    def put(inputs: Tensor, grad: Tensor) -> None:
        queue.put(weight, bias, inputs, grad)

    def forward(inputs: Tensor) -> Tensor:
        whole = not queue.active or not torch.is_grad_enabled() or not own.weight.requires_grad
        if whole or torch.is_autocast_enabled(inputs.device.type):
            return functional.linear(inputs, own.weight, own.bias)
        detached = own.bias.detach() if own.bias is not None else None
        return _LinearInTwoParts.apply(queue.anchor, inputs, own.weight.detach(), detached, put)

    return forward


def join_linears(layers: list[nn.Linear]) -> None:
    """Undo ``split_linears``."""
    for own in layers:
        vars(own).pop("forward", None)
