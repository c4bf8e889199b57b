"""Split backward: gradients of inputs at once, gradients of weights on request.

The layers of a stage compute the same products as otherwise, bit for bit, but the product for the weight is deferred:
its two factors wait in a queue. Layers that ``split_layer_of`` does not know compute their whole backward at once.
Cf. Qi et al.: Zero bubble pipeline parallelism, ICLR 2024.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.zero.replica_groups import SHARED_BY

# Layers whose backward can be split: one computation for the gradient of the input, one for those of the weights.
#
# Each class repeats autograd's operations for the layer one by one, so that results are bit-identical. Norms are not
# split: the gradients of their weights are cheap, and deferring them would keep two more activations alive.


Memory = Callable[[tuple[int, ...], Tensor], Tensor]
"""``memory(shape, like)``: a scratch tensor for a result that is consumed before the next call."""


class SplitLayer(Protocol):
    """A layer whose backward can be split in two. Only the shape of a weight is kept: the weight may be elsewhere when
    its gradient is computed.
    """

    narrows = True
    """Whether the layer computes in the narrower dtype under ``torch.autocast``."""

    def supports(self, inputs: Tensor) -> bool:
        """Return whether a call with ``inputs`` can be split."""
        return True

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def grad_inputs(self, inputs: Tensor, weight: Tensor, grad: Tensor) -> Tensor | None:
        """Return the gradient of ``inputs``, given ``grad``, that of the output."""
        ...

    def grad_weights(self, inputs: Tensor, grad: Tensor, memory: Memory) -> Iterator[Tensor]:
        """Yield the gradient of the weight, then that of the bias."""
        ...


def split_layer_of(layer: nn.Module) -> SplitLayer | None:
    """Return how to split ``layer``; None: its computation is not known, and its whole backward runs at once.
    Subclasses count as unknown: they may compute anything."""
    kind = type(layer)
    if kind is nn.Linear:
        return _Linear()
    if isinstance(layer, nn.Embedding) and kind is nn.Embedding:
        plain = layer.max_norm is None and not layer.sparse
        return _Embedding(layer) if plain else None
    if kind in _CONVOLUTIONS:
        plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return _Convolution(layer) if plain else None
    if kind.__name__ == "Conv1D" and hasattr(layer, "nf"):  # of Transformers
        return _TransposedLinear()
    return None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _Linear(SplitLayer):
    """A linear layer with weight [out, in]."""

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(inputs, weight, bias)

    def grad_inputs(self, inputs: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return grad @ weight

    def grad_weights(self, inputs: Tensor, grad: Tensor, memory: Memory) -> Iterator[Tensor]:
        rows, columns = _rows(grad), _rows(inputs)
        yield torch.mm(rows.t(), columns, out=memory((rows.shape[1], columns.shape[1]), rows))
        yield rows.sum(0)


class _TransposedLinear(SplitLayer):
    """A linear layer with weight [in, out], and always a bias."""

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return torch.addmm(bias, _rows(inputs), weight).view(*inputs.shape[:-1], weight.shape[1])

    def grad_inputs(self, inputs: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return torch.mm(_rows(grad), weight.t()).view(inputs.shape)

    def grad_weights(self, inputs: Tensor, grad: Tensor, memory: Memory) -> Iterator[Tensor]:
        rows, columns = _rows(grad), _rows(inputs)
        yield torch.mm(columns.t(), rows, out=memory((columns.shape[1], rows.shape[1]), rows))
        yield rows.sum(0)


class _Embedding(SplitLayer):
    """An embedding, whose inputs have no gradient."""

    narrows = False

    def __init__(self, layer: nn.Embedding) -> None:
        self.rows = layer.num_embeddings
        self.padding = -1 if layer.padding_idx is None else layer.padding_idx
        self.by_frequency = layer.scale_grad_by_freq

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.embedding(weight, inputs, self.padding, self.by_frequency, False)

    def grad_inputs(self, inputs: Tensor, weight: Tensor, grad: Tensor) -> None:
        return None

    def grad_weights(self, inputs: Tensor, grad: Tensor, memory: Memory) -> Iterator[Tensor]:
        yield torch.ops.aten.embedding_dense_backward(
            grad, inputs, self.rows, self.padding, self.by_frequency
        )


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _Convolution(SplitLayer):
    def __init__(self, layer: Any) -> None:
        self.shape = _shape_of(layer)
        self.biases = [layer.out_channels] if layer.bias is not None else None
        self.settings = (
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.transposed,
            layer.output_padding,
            layer.groups,
        )

    def supports(self, inputs: Tensor) -> bool:
        return inputs.dim() == len(self.shape)  # batched input, not a single sample

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(inputs, weight, bias, *self.settings)

    def grad_inputs(self, inputs: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return self._backward(inputs, weight, grad, [True, False, False])[0]

    def grad_weights(self, inputs: Tensor, grad: Tensor, memory: Memory) -> Iterator[Tensor]:
        weight = grad.new_empty(1).expand(self.shape)  # only its shape is used
        _, *found = self._backward(inputs, weight, grad, [False, True, self.biases is not None])
        yield from (each for each in found if each is not None)

    def _backward(self, inputs: Tensor, weight: Tensor, grad: Tensor, wanted: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(grad, inputs, weight, self.biases, *self.settings, wanted)


def _shape_of(layer: Any) -> tuple[int, ...]:
    """Return the shape of the whole weight, even while it is released."""
    first, second = layer.out_channels, layer.in_channels
    if layer.transposed:
        first, second = second, first
    return (first, second // layer.groups, *layer.kernel_size)


Add = Callable[[int, Tensor], None]
"""Accumulates a gradient: the number of its parameter, and the value."""


class WeightQueue:
    """Queue of the factors of deferred weight gradients, by micro-batch and chunk. ``active`` during a batch with split
    backwards."""

    def __init__(self, add: Add) -> None:
        self.add = add
        self.active = False
        self.part: tuple[int, int] = (-1, 0)
        """Micro-batch and chunk whose backward is running."""
        # Input of every split layer, so that backward also reaches layers whose other input needs no gradient.
        self.anchor = torch.zeros((), requires_grad=True)
        self._waiting: dict[tuple[int, int], list[tuple[_DeferredLayer, Tensor, Tensor]]] = {}
        self._scratch: Tensor | None = None

    def put(self, layer: _DeferredLayer, inputs: Tensor, grad: Tensor) -> None:
        self._waiting.setdefault(self.part, []).append((layer, inputs, grad))

    def compute(self, part: tuple[int, int]) -> None:
        """Compute the deferred gradients of ``part``, a micro-batch and chunk, in the order of its backward."""
        for layer, inputs, grad in self._waiting.pop(part, ()):
            gradients = layer.split.grad_weights(inputs, grad, self._memory)
            for number, gradient in zip(layer.numbers, gradients, strict=False):
                self.add(number, gradient.to(layer.dtype))

    def _memory(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return scratch memory for a product, reused for the next one: each gradient is accumulated before the next is
        computed. The system would zero newly allocated memory page by page."""
        numel, scratch = torch.Size(shape).numel(), self._scratch
        if scratch is None or scratch.numel() < numel or scratch.dtype != like.dtype:
            self._scratch = scratch = like.new_empty(numel)
        return scratch[:numel].view(shape)

    def clear(self) -> None:
        """Drop all factors and the scratch memory, at the end of a batch."""
        self._waiting.clear()
        self._scratch = None


class _DeferredLayer:
    """The forward of a layer with split backward; ``numbers``: of its weight, and of its bias if it has one."""

    def __init__(self, own: nn.Module, split: SplitLayer, numbers: list[int], queue: WeightQueue) -> None:
        self.own, self.split, self.numbers, self.queue = own, split, numbers, queue

    def __deepcopy__(self, memo: dict[int, Any]) -> _DeferredLayer:
        """Return the forward for a copied module, such as an average of the weights, whose backward is not split."""
        return _DeferredLayer(copy.deepcopy(self.own, memo), self.split, self.numbers, WeightQueue(_discard))

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weight in the product, to which autocast may have narrowed it."""
        weight: Any = self.own.weight
        return weight.dtype

    def forward(self, inputs: Tensor, *rest: Any, **named: Any) -> Tensor:
        own, queue = self.own, self.queue
        weight: Any = own.weight
        whole = not queue.active or not torch.is_grad_enabled() or not weight.requires_grad
        if whole or rest or named or not self.split.supports(inputs):
            return type(own).forward(own, inputs, *rest, **named)
        bias: Any = getattr(own, "bias", None)
        tensors = [inputs, weight.detach(), bias.detach() if bias is not None else None]
        kind = inputs.device.type
        if not torch.is_autocast_enabled(kind):
            return _SplitBackward.apply(queue.anchor, *tensors, self)
        if self.split.narrows:  # as autocast does for such an operation
            dtype = torch.get_autocast_dtype(kind)
            tensors = [
                each if each is None or each.dtype.itemsize > 4 else each.to(dtype) for each in tensors
            ]
        with torch.autocast(kind, enabled=False):
            return _SplitBackward.apply(queue.anchor, *tensors, self)


class _SplitBackward(torch.autograd.Function):
    """Computes a layer whose ``weight`` and ``bias`` are detached: their gradients come from the queue, not from
    autograd."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: _DeferredLayer
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer = layer
        output = layer.split.forward(inputs, weight, bias)
        # A product of 3-D inputs is a view of the 2-D product, and the next layer could not change a view in place.
        return torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        (grad,) = grads
        layer = ctx.layer
        layer.queue.put(layer, inputs.detach(), grad)
        wanted = ctx.needs_input_grad[1]
        return None, (layer.split.grad_inputs(inputs, weight, grad) if wanted else None), None, None, None


def split_layers(module: nn.Module, numbers: Mapping[int, int], queue: WeightQueue) -> list[nn.Module]:
    """Let the layers of ``module`` defer gradients of weights while ``queue`` is active. Returns these layers.

    ``numbers``: id of a trained parameter -> number. Excluded: weights used by several layers or stages, layers with
    frozen parameters, and layers that cannot be split.
    """
    uses: dict[int, int] = {}
    for own in module.modules():
        for param in own._parameters.values():
            uses[id(param)] = uses.get(id(param), 0) + 1
    found = []
    for own in module.modules():
        split = split_layer_of(own) if "forward" not in vars(own) else None
        if split is None:
            continue
        names = [name for name in ("weight", "bias") if own._parameters.get(name) is not None]
        params = [own._parameters[name] for name in names]
        plain = all(id(p) in numbers and uses[id(p)] == 1 and not hasattr(p, SHARED_BY) for p in params)
        if plain and len(params) == sum(p is not None for p in own._parameters.values()):
            vars(own)["forward"] = _DeferredLayer(own, split, [numbers[id(p)] for p in params], queue).forward
            found.append(own)
    return found


def _discard(number: int, grad: Tensor) -> None:
    """Ignore a gradient: the sink of a queue that is never active."""


def join_layers(layers: list[nn.Module]) -> None:
    """Undo ``split_layers``."""
    for own in layers:
        vars(own).pop("forward", None)
