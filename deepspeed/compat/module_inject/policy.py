"""Policies: descriptions of a model's layer and of where its weights are. Engines here follow the model's graph and
need none; policies name layers (in ``injection_policy``) and are there for scripts that read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.compat.types import ActivationFuncType, NormType

Operands = tuple[Tensor | None, ...]


def transpose(data: Tensor) -> Tensor:
    """Swap the last two dimensions of a contiguous tensor within its own memory. ``data`` has no meaning afterwards."""
    swapped = data.transpose(-1, -2)
    result = data.view(-1).view(swapped.shape)
    return result.copy_(swapped.clone())


class DSPolicy(ABC):
    """Base of all policies. ``_orig_layer_class``: the class of the layers that it is for, or several."""

    _orig_layer_class: ClassVar[Any] = None

    def __init__(self) -> None:
        self.cuda_graph_supported = False

    @abstractmethod
    def attention(self) -> Any:
        """Weights and biases of the attention: those that go in, then those that come out."""


class TransformerPolicy(DSPolicy):
    """Policy of a layer with attention and a feed-forward part.

    ``linear_layer``: weights are [outputs, inputs]. ``pre_attn_norm``: norms stand before attention and feed-forward
    part. ``split_qkv``: the fused projection has queries, keys and values one after the other.
    """

    hf_model_config: ClassVar[Any] = None

    def __init__(
        self,
        inference: bool = True,
        linear_layer: bool = True,
        scale_attention: bool = True,
        megatron_v2: bool = False,
        use_mup: bool = False,
        mlp_act_func_type: ActivationFuncType = ActivationFuncType.GELU,
        pre_attn_norm: bool = True,
        use_load_prefix: bool = False,
        split_qkv: bool = True,
        norm_type: NormType = NormType.LayerNorm,
    ) -> None:
        super().__init__()
        self.inference = inference
        self.linear_layer = linear_layer
        self.scale_attention = scale_attention
        self.is_megatron_v2 = megatron_v2
        self.use_mup = use_mup
        self.mlp_act_func_type = mlp_act_func_type
        self.pre_attn_norm = pre_attn_norm
        self.use_load_prefix = use_load_prefix
        self.split_qkv = split_qkv
        self.norm_type = norm_type

    @abstractmethod
    def attention(self) -> Any:
        """(fused weight of q, k and v, its bias, weight of the projection behind, its bias)."""

    @abstractmethod
    def get_hidden_heads(self) -> Any:
        """(width, heads, epsilon of the norms, width of the feed-forward part)."""

    @abstractmethod
    def mlp(self) -> Any:
        """(weight going in, bias, weight coming out, bias)."""

    @abstractmethod
    def layernorm(self) -> Any:
        """(weight and bias of the norm at the feed-forward part, weight and bias of the one at the attention)."""


def at(layer: Any, path: str) -> Any:
    """``layer.a.b`` for "a.b"; None if it is not there."""
    try:
        return attrgetter(path)(layer)
    except AttributeError:
        return None


def operands(layer: Any, path: str) -> Operands:
    """Weight and bias of the part at ``path``; None for what it does not have."""
    part = at(layer, path)
    return getattr(part, "weight", None), getattr(part, "bias", None)


def side_by_side(layer: Any, paths: Sequence[str]) -> Operands:
    """Weights and biases of several linear layers [outputs, inputs] as those of one."""
    found = [operands(layer, path) for path in paths]
    if len(found) == 1:
        return found[0]
    weights = [weight for weight, _ in found if weight is not None]
    biases = [bias for _, bias in found if bias is not None]
    return torch.cat(weights, 0), torch.cat(biases, 0) if len(biases) == len(weights) else None
