"""Weights of transformer layers that were trained for 8 bits, stored in 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from deepspeed.base.module_utils import keep_hooks

__all__ = ["quantize_module", "quantize_transformer_layer"]

_MEGATRON = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_BERT = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)


def quantize_transformer_layer(
    orig_layer_impl: type[nn.Module], model: nn.Module, megatron: bool = False, preln: bool = False
) -> nn.Module:
    """Make the weights of each linear layer of ``orig_layer_impl`` int8, in place. Their values are kept as they are:
    they have to be integers already. For weights with scales use ``init_inference(dtype=torch.int8)``.

    Args:
        orig_layer_impl: the class of the layers: BERT's, or Megatron's with ``megatron``.
        model: the model.
        preln: the layers' norms stand in front, with ``intermediate.dense_act``.

    Returns:
        The model.
    """
    names = _MEGATRON if megatron else _BERT

    def quantize(layer: nn.Module) -> nn.Module:
        for name in names:
            path = "intermediate.dense_act" if preln and name == "intermediate.dense" else name
            part = layer.get_submodule(path)
            weight = part.get_parameter("weight")
            part.weight = nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)
        return layer

    return quantize_module(model, orig_layer_impl, quantize)


def quantize_module(
    model: nn.Module, orig_class: type[nn.Module], quantize_fn: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    """Put ``quantize_fn(layer)`` in the place of each layer of exactly this class; the model."""
    for name, child in model.named_children():
        if type(child) is orig_class:
            made = quantize_fn(child)
            keep_hooks(child, made)
            setattr(model, name, made)
        else:
            quantize_module(child, orig_class, quantize_fn)
    return model
