"""Describe where GPT-2 layers have their weights, for scripts that read them or name a layer (``injection_policy``)."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from torch import Tensor, nn

from deepspeed.compat.types import ActivationFuncType, NormType

# Engines here follow the model's graph and need no policies.

Operands = tuple[Tensor | None, ...]


def transpose(data: Tensor) -> Tensor:
    """Swap the last two dimensions of a contiguous tensor within its own memory. ``data`` is invalid afterwards."""
    swapped = data.transpose(-1, -2)
    result = data.view(-1).view(swapped.shape)
    return result.copy_(swapped.clone())


class _OrigClass:
    """The class of the layers, if Transformers' GPT-2 is imported: a model of it cannot exist otherwise."""

    def __get__(self, policy: Any, owner: type) -> list[type] | None:
        module = sys.modules.get("transformers.models.gpt2.modeling_gpt2")
        return None if module is None else [module.GPT2Block]


class HFGPT2LayerPolicy:
    """``client_module``: a layer, or None. Its weights are [inputs, outputs]."""

    _orig_layer_class: ClassVar[Any] = _OrigClass()
    linear_layer = False
    scale_attention = pre_attn_norm = split_qkv = True
    is_megatron_v2 = use_mup = use_load_prefix = False
    mlp_act_func_type = ActivationFuncType.GELU
    norm_type = NormType.LayerNorm

    def __init__(self, client_module: nn.Module | None, inference: bool = True) -> None:
        self.client_module: Any = client_module
        self.inference = inference

    def attention(self, enable_training: bool = False) -> Operands:
        """Return (fused weight of q, k and v, its bias, weight of the projection behind, its bias)."""
        attention = self.client_module.attn
        return (*_operands(attention.c_attn), *_operands(attention.c_proj))

    def mlp(self, enable_training: bool = False) -> Operands:
        """Return (weight going in, bias, weight coming out, bias)."""
        mlp = self.client_module.mlp
        return (*_operands(mlp.c_fc), *_operands(mlp.c_proj))

    def layernorm(self) -> Operands:
        """Return weight and bias of the norm at the feed-forward part, weight and bias of the one at the attention."""
        return (*_operands(self.client_module.ln_2), *_operands(self.client_module.ln_1))

    def get_hidden_heads(self) -> tuple[int, int, float, int]:
        """Return (width, heads, epsilon of the norms, width of the feed-forward part)."""
        layer = self.client_module
        width = layer.ln_1.weight.shape[0]
        return width, layer.attn.num_heads, layer.ln_1.eps, layer.mlp.c_fc.weight.shape[1]


def _operands(part: Any) -> Operands:
    return part.weight, part.bias
