"""Backwards in two parts: gradients of inputs at once, those of weights when they are asked for.

The layers of a stage compute the same products as always, with the same bits, but the product for the weight is put
off: its two factors wait in a queue. Layers of which ``split_layers.py`` knows no such parts do all of their backward
at once. Cf. Qi et al.: Zero bubble pipeline parallelism, ICLR 2024.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.parallel.pipeline.split_layers import SplitLayer, split_layer_of
from deepspeed.zero.replica_groups import SHARED_BY

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
        # Backward also reaches layers whose input wants no gradient.
        self.anchor = torch.zeros((), requires_grad=True)
        self._waiting: dict[tuple[int, int], list[tuple[_PutOff, Tensor, Tensor]]] = {}
        self._scratch: Tensor | None = None

    def put(self, layer: _PutOff, inputs: Tensor, grad: Tensor) -> None:
        self._waiting.setdefault(self.part, []).append((layer, inputs, grad))

    def compute(self, part: tuple[int, int]) -> None:
        """The gradients that wait for a micro-batch of a chunk, in the order in which its backward reached them."""
        for layer, inputs, grad in self._waiting.pop(part, ()):
            gradients = layer.form.of_weights(inputs, grad, self._memory)
            for number, gradient in zip(layer.numbers, gradients, strict=False):
                self.add(number, gradient.to(layer.dtype))

    def _memory(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """For a product: each gradient is added up before the next is computed. New memory for each would be cleared by
        the system page by page."""
        numel, scratch = torch.Size(shape).numel(), self._scratch
        if scratch is None or scratch.numel() < numel or scratch.dtype != like.dtype:
            self._scratch = scratch = like.new_empty(numel)
        return scratch[:numel].view(shape)

    def clear(self) -> None:
        """At the end of a batch."""
        self._waiting.clear()
        self._scratch = None


class _PutOff:
    """A layer that is split: ``numbers`` of its weight, and of its bias if it has one."""

    def __init__(self, own: nn.Module, form: SplitLayer, numbers: list[int], queue: WeightQueue) -> None:
        self.own, self.form, self.numbers, self.queue = own, form, numbers, queue

    def __deepcopy__(self, memo: dict[int, Any]) -> _PutOff:
        """Return a handle for a copied module, such as an average of the weights: it does all of its backward at
        once."""
        return _PutOff(copy.deepcopy(self.own, memo), self.form, self.numbers, WeightQueue(_nowhere))

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weight in the product, to which autocast may have narrowed it."""
        weight: Any = self.own.weight
        return weight.dtype

    def forward(self, inputs: Tensor, *rest: Any, **named: Any) -> Tensor:
        own, queue = self.own, self.queue
        weight: Any = own.weight
        whole = not queue.active or not torch.is_grad_enabled() or not weight.requires_grad
        if whole or rest or named or not self.form.takes(inputs):
            return type(own).forward(own, inputs, *rest, **named)
        bias: Any = getattr(own, "bias", None)
        tensors = [inputs, weight.detach(), bias.detach() if bias is not None else None]
        kind = inputs.device.type
        if not torch.is_autocast_enabled(kind):
            return _InTwoParts.apply(queue.anchor, *tensors, self)
        if self.form.narrows:  # what autocast does for such an operation
            dtype = torch.get_autocast_dtype(kind)
            tensors = [
                each if each is None or each.dtype.itemsize > 4 else each.to(dtype) for each in tensors
            ]
        with torch.autocast(kind, enabled=False):
            return _InTwoParts.apply(queue.anchor, *tensors, self)


class _InTwoParts(torch.autograd.Function):
    """``weight`` and ``bias`` are detached: their gradients do not come from autograd."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: _PutOff
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer = layer
        output = layer.form.forward(inputs, weight, bias)
        # A product of 3-D inputs is a view of that of their rows, which the next layer could not change in place.
        return torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        (grad,) = grads
        layer = ctx.layer
        layer.queue.put(layer, inputs.detach(), grad)
        wanted = ctx.needs_input_grad[1]
        return None, (layer.form.of_inputs(inputs, weight, grad) if wanted else None), None, None, None


def split_layers(module: nn.Module, numbers: Mapping[int, int], queue: WeightQueue) -> list[nn.Module]:
    """Let the layers of ``module`` put off gradients of weights while ``queue`` is active; returns those that do.

    ``numbers``: id of a trained parameter -> number. Left out: weights with several uses or stages, layers that are not
    trained as a whole, and those that cannot be split.
    """
    uses: dict[int, int] = {}
    for own in module.modules():
        for param in own._parameters.values():
            uses[id(param)] = uses.get(id(param), 0) + 1
    found = []
    for own in module.modules():
        form = split_layer_of(own) if "forward" not in vars(own) else None
        if form is None:
            continue
        names = [name for name in ("weight", "bias") if own._parameters.get(name) is not None]
        params = [own._parameters[name] for name in names]
        plain = all(id(p) in numbers and uses[id(p)] == 1 and not hasattr(p, SHARED_BY) for p in params)
        if plain and len(params) == sum(p is not None for p in own._parameters.values()):
            vars(own)["forward"] = _PutOff(own, form, [numbers[id(p)] for p in params], queue).forward
            found.append(own)
    return found


def _nowhere(number: int, grad: Tensor) -> None:
    """Ignore a gradient: the sink of a queue that is never active."""


def join_layers(layers: list[nn.Module]) -> None:
    """Undo ``split_layers``."""
    for own in layers:
        vars(own).pop("forward", None)
