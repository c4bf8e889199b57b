"""Policies of well-known layers: where each kind has its weights."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deepspeed.compat.types import ActivationFuncType, NormType

# Policies: descriptions of a model's layer and of where its weights are. Engines here follow the model's graph
# and need none; policies name layers (in ``injection_policy``) and are there for scripts that read them.

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


class _OrigClass:
    """The classes of a policy's layers, as far as the packages that have them are imported: a model of such a class
    cannot exist otherwise."""

    def __get__(self, policy: Any, owner: type[_LayerPolicy]) -> list[type] | None:
        found = (at(sys.modules.get(module), name) for module, name in owner._classes)
        return [each for each in found if each is not None] or None


class _LayerPolicy(TransformerPolicy):
    """Reads what the tables of its subclass name. ``client_module``: a layer, or None."""

    _orig_layer_class: ClassVar[Any] = _OrigClass()
    _classes: ClassVar[tuple[tuple[str, str], ...]] = ()
    _settings: ClassVar[dict[str, Any]] = {}
    _qkv: ClassVar[tuple[str, ...]] = ()
    _out: ClassVar[str] = ""
    _mlp: ClassVar[tuple[tuple[str, ...], str]] = ((), "")
    _norms: ClassVar[tuple[str, str]] = ("", "")
    _heads: ClassVar[tuple[str, ...]] = ("attn.num_heads", "self_attn.num_heads")

    def __init__(self, client_module: nn.Module | None, inference: bool = True) -> None:
        super().__init__(inference, **self._settings)
        self.client_module = client_module

    def attention(self, enable_training: bool = False) -> Operands:
        weight, bias = side_by_side(self.client_module, self._qkv)
        fused = [_parameter(each, enable_training) for each in (weight, bias)]
        return (*fused, *operands(self.client_module, self._out))

    def mlp(self, enable_training: bool = False) -> Operands:
        inner, outer = self._mlp
        weight, bias = side_by_side(self.client_module, inner)
        return (
            _parameter(weight, enable_training),
            _parameter(bias, enable_training),
            *operands(self.client_module, outer),
        )

    def layernorm(self) -> Operands:
        later, first = self._norms
        return (*operands(self.client_module, later), *operands(self.client_module, first))

    def get_hidden_heads(self) -> tuple[Any, ...]:
        first = at(self.client_module, self._norms[1])
        heads = (at(self.client_module, path) for path in self._heads)
        inner, _ = operands(self.client_module, self._mlp[0][0])
        width = -1 if inner is None else inner.shape[0 if self.linear_layer else 1]
        eps = next((getattr(first, n) for n in ("eps", "variance_epsilon") if hasattr(first, n)), None)
        return first.weight.shape[0], next((n for n in heads if n is not None), None), eps, width


def _parameter(value: Tensor | None, trained: bool) -> Tensor | None:
    """``value`` itself if it is one of the layer's own."""
    if value is None or isinstance(value, nn.Parameter):
        return value
    return nn.Parameter(value.detach(), requires_grad=trained)


def _transformers(family: str, *names: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"transformers.models.{family}.modeling_{family}", name) for name in names)


class HFGPT2LayerPolicy(_LayerPolicy):
    """Its weights are [inputs, outputs]."""

    _classes = _transformers("gpt2", "GPT2Block")
    _settings: ClassVar = {"linear_layer": False}
    _qkv = ("attn.c_attn",)
    _out = "attn.c_proj"
    _mlp = (("mlp.c_fc",), "mlp.c_proj")
    _norms = ("ln_2", "ln_1")
