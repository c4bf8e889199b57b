"""Linear layers and embeddings whose weight is stored in few bits, and made anew for each use.

A weight is one frozen uint8 parameter (``concat_to_compat_param``), so that ZeRO partitions and offloads it as any
other: what travels between ranks, host and files are the integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.ops.formats.linear import frozen_linear
from deepspeed.transforms.weight_quantization.utils import (
    GroupwiseDequantizer,
    GroupwiseQuantizer,
    concat_to_compat_param,
    parts_of_param,
)


def get_quantize_weight_fn(
    quantizer: GroupwiseQuantizer, pre_quant_weight: nn.Parameter
) -> Callable[[], Tensor]:
    """A function that gives the weight's bytes."""

    def quantized() -> Tensor:
        return concat_to_compat_param(*quantizer.quantize(pre_quant_weight), return_param=False)

    return quantized


def get_quantized_weight_wrapper(
    model: nn.Module, pre_quant_weight: nn.Parameter, quantize_weight_fn: Callable[[], Tensor]
) -> nn.Parameter:
    """The parameter that takes the place of ``pre_quant_weight``: the same object for a weight that several layers of
    ``model`` share."""
    made: Any = getattr(pre_quant_weight, _BECAME, None)
    if made is None:
        made = nn.Parameter(quantize_weight_fn(), requires_grad=False)
        setattr(pre_quant_weight, _BECAME, made)
    return made


_BECAME = "_ds_quantized"


class _Stored(nn.Module):
    """Common part of both kinds of layers: the weight's bytes, and its values."""

    weight: nn.Parameter
    like: Tensor

    def _store(self, config: dict[str, Any], layer: nn.Module) -> None:
        weight: Any = layer.weight
        self.config = dict(config)
        self.full_shape = torch.Size(weight.shape)
        self.kept = torch.float16 if weight.dtype is torch.float16 else torch.float32
        # its dtype is that of the values, and follows casts of the module
        self.register_buffer(
            "like", torch.empty(0, dtype=weight.dtype, device=weight.device), persistent=False
        )
        made = get_quantized_weight_wrapper(
            layer, weight, get_quantize_weight_fn(GroupwiseQuantizer(config), weight)
        )
        self._parameters["weight"] = made

    def values(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight in its own shape, made anew."""
        parts = parts_of_param(self.weight.detach(), self.config, self.full_shape, self.kept)
        return GroupwiseDequantizer(self.config, dtype or self.like.dtype).dequantize(*parts)


class GroupwiseLinear(_Stored, nn.Linear):
    """In the place of ``pre_quant_layer``; its bias is the same. ValueError: groups do not divide the weight."""

    def __init__(self, config: dict[str, Any], pre_quant_layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = pre_quant_layer.in_features, pre_quant_layer.out_features
        self._store(config, pre_quant_layer)
        self.register_parameter("bias", pre_quant_layer.bias)
        self.train(pre_quant_layer.training)

    def forward(self, input: Tensor) -> Tensor:
        return frozen_linear(input, self._values_for, self.bias)

    def _values_for(self, like: Tensor) -> Tensor:
        return self.values(like.dtype)


class GroupwiseEmbedding(_Stored, nn.Embedding):
    """In the place of ``pre_quant_layer``. ValueError: groups do not divide the weight."""

    def __init__(self, config: dict[str, Any], pre_quant_layer: nn.Embedding) -> None:
        nn.Module.__init__(self)
        for name in ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "sparse"):
            setattr(self, name, getattr(pre_quant_layer, name))
        self.scale_grad_by_freq = False
        self._store(config, pre_quant_layer)
        self.train(pre_quant_layer.training)

    def forward(self, input: Tensor) -> Tensor:
        rows = self._rows(input.reshape(-1))
        return rows.view(*input.shape, self.embedding_dim)

    def _rows(self, tokens: Tensor) -> Tensor:
        """Only what is looked up becomes values, if a row's groups are its own."""
        words, scale, least = parts_of_param(self.weight.detach(), self.config, self.full_shape, self.kept)
        maker = GroupwiseDequantizer(self.config, self.like.dtype)
        if maker.grouping.group_dim % 2 == 0:
            return maker.dequantize(words, scale, least)[tokens]
        return maker.dequantize(words[tokens], scale[tokens], least[tokens])


QuantizedLinear, QuantizedEmbedding = GroupwiseLinear, GroupwiseEmbedding
"""The documented names. (`deepspeed.transforms.lora` has another documented ``QuantizedLinear``: made of sizes, with a
weight of few-bit floating-point numbers. Both are products by ``ops/formats/linear.py``.)"""
