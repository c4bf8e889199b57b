"""Layers whose backward comes apart: what their input's gradient takes, and what their weights' takes.

Each form repeats what autograd does for the layer, operation by operation, so that the bits are the same. Norms have
none: the gradients of their weights cost little, and two more activations would have to wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

Memory = Callable[[tuple[int, ...], Tensor], Tensor]
"""``memory(shape, like)``: a tensor for a result that is used before the next one is made."""


class SplitLayer(Protocol):
    """A layer whose backward can be split in two. Only the shape of a weight is kept: the weight may be elsewhere when
    its gradient is computed.
    """

    narrows: bool
    """Whether ``torch.autocast`` lets it compute in the narrower dtype."""

    def takes(self, inputs: Tensor) -> bool:
        """Return whether a call with ``inputs`` can be split."""
        ...

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def of_inputs(self, inputs: Tensor, weight: Tensor, grad: Tensor) -> Tensor | None:
        """The gradient of ``inputs``, from that of the output."""
        ...

    def of_weights(self, inputs: Tensor, grad: Tensor, memory: Memory) -> Iterator[Tensor]:
        """The gradient of the weight, and then that of the bias."""
        ...


def split_layer_of(layer: nn.Module) -> SplitLayer | None:
    """None: what the layer computes is not known, and all of its backward is done at once. A subclass may compute
    anything."""
    kind = type(layer)
    if kind is nn.Linear:
        return _Linear()
    if isinstance(layer, nn.Embedding) and kind is nn.Embedding:
        plain = layer.max_norm is None and not layer.sparse
        return _Embedding(layer) if plain else None
    if kind in _CONVOLUTIONS:
        plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return _Convolution(layer) if plain else None
    if kind.__name__ == "Conv1D" and hasattr(layer, "nf"):  # that of Transformers
        return _TransposedLinear()
    return None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _Linear:
    """Weight [out, in]."""

    narrows = True

    def takes(self, inputs: Tensor) -> bool:
        return True

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(inputs, weight, bias)

    def of_inputs(self, inputs: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return grad @ weight

    def of_weights(self, inputs: Tensor, grad: Tensor, memory: Memory) -> Iterator[Tensor]:
        rows, columns = _rows(grad), _rows(inputs)
        yield torch.mm(rows.t(), columns, out=memory((rows.shape[1], columns.shape[1]), rows))
        yield rows.sum(0)


class _TransposedLinear:
    """Weight [in, out], and always a bias."""

    narrows = True

    def takes(self, inputs: Tensor) -> bool:
        return True

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return torch.addmm(bias, _rows(inputs), weight).view(*inputs.shape[:-1], weight.shape[1])

    def of_inputs(self, inputs: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return torch.mm(_rows(grad), weight.t()).view(inputs.shape)

    def of_weights(self, inputs: Tensor, grad: Tensor, memory: Memory) -> Iterator[Tensor]:
        rows, columns = _rows(grad), _rows(inputs)
        yield torch.mm(columns.t(), rows, out=memory((columns.shape[1], rows.shape[1]), rows))
        yield rows.sum(0)


class _Embedding:
    """Has no gradient of inputs."""

    narrows = False

    def __init__(self, layer: nn.Embedding) -> None:
        self.rows = layer.num_embeddings
        self.padding = -1 if layer.padding_idx is None else layer.padding_idx
        self.by_frequency = layer.scale_grad_by_freq

    def takes(self, inputs: Tensor) -> bool:
        return True

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.embedding(weight, inputs, self.padding, self.by_frequency, False)

    def of_inputs(self, inputs: Tensor, weight: Tensor, grad: Tensor) -> None:
        return None

    def of_weights(self, inputs: Tensor, grad: Tensor, memory: Memory) -> Iterator[Tensor]:
        yield torch.ops.aten.embedding_dense_backward(
            grad, inputs, self.rows, self.padding, self.by_frequency
        )


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _Convolution:
    narrows = True

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

    def takes(self, inputs: Tensor) -> bool:
        return inputs.dim() == len(self.shape)  # of a batch, not of one sample

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(inputs, weight, bias, *self.settings)

    def of_inputs(self, inputs: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        return self._backward(inputs, weight, grad, [True, False, False])[0]

    def of_weights(self, inputs: Tensor, grad: Tensor, memory: Memory) -> Iterator[Tensor]:
        weight = grad.new_empty(1).expand(self.shape)  # of which only the shape is looked at
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
