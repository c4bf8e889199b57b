"""Policies of well-known layers: where each kind has its weights."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from torch import Tensor, nn

from deepspeed.compat.module_inject.policy import Operands, TransformerPolicy, at, operands, side_by_side


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
