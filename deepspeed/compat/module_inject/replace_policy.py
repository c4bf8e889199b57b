"""Policies of well-known layers: where each kind has its weights."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deepspeed.base.types import ActivationFuncType, NormType
from deepspeed.compat.module_inject.policy import (
    DSPolicy,
    Operands,
    TransformerPolicy,
    at,
    operands,
    side_by_side,
)

__all__ = [
    "BLOOMLayerPolicy",
    "GPTNEOXLayerPolicy",
    "HFBertLayerPolicy",
    "HFCLIPLayerPolicy",
    "HFDistilBertLayerPolicy",
    "HFGPT2LayerPolicy",
    "HFGPTJLayerPolicy",
    "HFGPTNEOLayerPolicy",
    "HFOPTLayerPolicy",
    "InternLMLayerPolicy",
    "LLAMA2LayerPolicy",
    "LLAMALayerPolicy",
    "MegatronLayerPolicy",
    "MegatronMoELayerPolicy",
    "UNetPolicy",
    "VAEPolicy",
    "generic_policies",
    "replace_policies",
]


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

    def get_q_k_v(self) -> Operands | None:
        """Weights and biases of query, key and value; None if they are one projection."""
        if len(self._qkv) == 1:
            return None
        return tuple(each for path in self._qkv for each in operands(self.client_module, path))

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


class HFBertLayerPolicy(_LayerPolicy):
    """BERT's and RoBERTa's, also with the norms in front (``PreAttentionLayerNorm``)."""

    _classes = (*_transformers("bert", "BertLayer"), *_transformers("roberta", "RobertaLayer"))
    _settings: ClassVar = {"pre_attn_norm": False}
    _qkv = ("attention.self.query", "attention.self.key", "attention.self.value")
    _out = "attention.output.dense"
    _mlp = (("intermediate.dense",), "output.dense")
    _norms = ("attention.output.LayerNorm", "output.LayerNorm")
    _heads = ("attention.self.num_attention_heads",)

    def __init__(self, client_module: nn.Module | None, inference: bool = False) -> None:
        super().__init__(client_module, inference)
        self.cuda_graph_supported = True


class HFDistilBertLayerPolicy(_LayerPolicy):
    _classes = _transformers("distilbert", "TransformerBlock")
    _settings: ClassVar = {"pre_attn_norm": False}
    _qkv = ("attention.q_lin", "attention.k_lin", "attention.v_lin")
    _out = "attention.out_lin"
    _mlp = (("ffn.lin1",), "ffn.lin2")
    _norms = ("sa_layer_norm", "output_layer_norm")
    _heads = ("attention.n_heads",)

    def __init__(self, client_module: nn.Module | None, inference: bool = False, preln: bool = False) -> None:
        super().__init__(client_module, inference)
        self.preln = preln
        self.cuda_graph_supported = True


class HFCLIPLayerPolicy(_LayerPolicy):
    _classes = _transformers("clip", "CLIPEncoderLayer")
    _qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    _out = "self_attn.out_proj"
    _mlp = (("mlp.fc1",), "mlp.fc2")
    _norms = ("layer_norm2", "layer_norm1")

    def __init__(self, client_module: nn.Module | None, inference: bool = False) -> None:
        super().__init__(client_module, inference)
        self.cuda_graph_supported = True


class HFGPT2LayerPolicy(_LayerPolicy):
    """Its weights are [inputs, outputs]."""

    _classes = _transformers("gpt2", "GPT2Block")
    _settings: ClassVar = {"linear_layer": False}
    _qkv = ("attn.c_attn",)
    _out = "attn.c_proj"
    _mlp = (("mlp.c_fc",), "mlp.c_proj")
    _norms = ("ln_2", "ln_1")


class HFGPTNEOLayerPolicy(_LayerPolicy):
    _classes = _transformers("gpt_neo", "GPTNeoBlock")
    _settings: ClassVar = {"scale_attention": False}
    _qkv = tuple(f"attn.attention.{name}_proj" for name in ("q", "k", "v"))
    _out = "attn.attention.out_proj"
    _mlp = (("mlp.c_fc",), "mlp.c_proj")
    _norms = ("ln_2", "ln_1")
    _heads = ("attn.attention.num_heads",)


class HFGPTJLayerPolicy(_LayerPolicy):
    """One norm for attention and feed-forward part."""

    _classes = _transformers("gptj", "GPTJBlock")
    _qkv = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
    _out = "attn.out_proj"
    _mlp = (("mlp.fc_in",), "mlp.fc_out")
    _norms = ("", "ln_1")
    _heads = ("attn.num_attention_heads",)


class GPTNEOXLayerPolicy(_LayerPolicy):
    """The fused projection has query, key and value head by head."""

    _classes = _transformers("gpt_neox", "GPTNeoXLayer")
    _settings: ClassVar = {"split_qkv": False, "megatron_v2": True}
    _qkv = ("attention.query_key_value",)
    _out = "attention.dense"
    _mlp = (("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h")
    _norms = ("post_attention_layernorm", "input_layernorm")
    _heads = ("attention.num_attention_heads", "attention.config.num_attention_heads")


class BLOOMLayerPolicy(_LayerPolicy):
    _classes = _transformers("bloom", "BloomBlock")
    _settings: ClassVar = {"split_qkv": False, "megatron_v2": True, "use_load_prefix": True}
    _qkv = ("self_attention.query_key_value",)
    _out = "self_attention.dense"
    _mlp = (("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h")
    _norms = ("post_attention_layernorm", "input_layernorm")
    _heads = ("self_attention.num_heads",)


class HFOPTLayerPolicy(_LayerPolicy):
    _classes = _transformers("opt", "OPTDecoderLayer")
    _settings: ClassVar = {"mlp_act_func_type": ActivationFuncType.ReLU, "use_load_prefix": True}
    _qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    _out = "self_attn.out_proj"
    _mlp = (("fc1",), "fc2")
    _norms = ("final_layer_norm", "self_attn_layer_norm")

    def __init__(
        self, client_module: nn.Module | None, inference: bool = True, use_load_prefix: bool = True
    ) -> None:
        super().__init__(client_module, inference)
        self.use_load_prefix = use_load_prefix
        if client_module is not None and not getattr(client_module, "do_layer_norm_before", True):
            self.pre_attn_norm = False


class LLAMALayerPolicy(_LayerPolicy):
    """Its two products of the feed-forward part stand one after the other: up, then gate."""

    _classes = _transformers("llama", "LlamaDecoderLayer")
    _settings: ClassVar = {
        "mlp_act_func_type": ActivationFuncType.GATED_SILU,
        "norm_type": NormType.RMSNorm,
    }
    _qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    _out = "self_attn.o_proj"
    _mlp = (("mlp.up_proj", "mlp.gate_proj"), "mlp.down_proj")
    _norms = ("post_attention_layernorm", "input_layernorm")
    _heads = ("self_attn.num_heads", "self_attn.config.num_attention_heads")


class InternLMLayerPolicy(LLAMALayerPolicy):
    """Its class comes with its weights: it is known by its name."""

    _classes = ()


class LLAMA2LayerPolicy(LLAMALayerPolicy):
    """In the layout of Meta's package ``llama``."""

    _classes = (("llama.model", "TransformerBlock"),)
    _qkv = ("attention.wq", "attention.wk", "attention.wv")
    _out = "attention.wo"
    _mlp = (("feed_forward.w3", "feed_forward.w1"), "feed_forward.w2")
    _norms = ("ffn_norm", "attention_norm")
    _heads = ("attention.n_local_heads", "n_heads")


class MegatronLayerPolicy(_LayerPolicy):
    """``version`` 0: the attention is called ``attention`` instead of ``self_attention``."""

    version: ClassVar[int] = 0
    moe_type: ClassVar[str] = "standard"
    megatron_v2: ClassVar[bool] = True
    use_mup: bool = False
    _classes = (
        ("megatron.model.transformer", "ParallelTransformerLayer"),
        ("megatron.legacy.model.transformer", "ParallelTransformerLayer"),
    )
    _mlp = (("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h")
    _norms = ("post_attention_layernorm", "input_layernorm")

    def __init__(self, client_module: nn.Module | None, inference: bool = True) -> None:
        super().__init__(client_module, inference)
        self.is_megatron_v2, self.use_mup = type(self).megatron_v2, type(self).use_mup
        part = next(
            (name for name in ("self_attention", "attention") if hasattr(client_module, name)), "attention"
        )
        vars(self).update(
            _qkv=(f"{part}.query_key_value",),
            _out=f"{part}.dense",
            _heads=(f"{part}.num_attention_heads", f"{part}.num_attention_heads_per_partition"),
        )


class MegatronMoELayerPolicy(MegatronLayerPolicy):
    """With experts: ``mlp`` gives those of the gated layer, one list each."""

    num_experts: ClassVar[int] = 1

    def mlp(self, enable_training: bool = False) -> Any:
        experts = at(self.client_module, "mlp.deepspeed_moe.experts.deepspeed_experts")
        if experts is None:
            return super().mlp(enable_training)
        paths = ("dense_h_to_4h.weight", "dense_h_to_4h.bias", "dense_4h_to_h.weight", "dense_4h_to_h.bias")
        return tuple([at(expert, path) for expert in experts] for path in paths)


class _DiffusersPolicy(DSPolicy):
    """Of a whole model of Diffusers, found by its class. The model runs as it is."""

    _model: ClassVar[tuple[str, str]] = ("", "")

    @property
    def wanted(self) -> type | None:
        module, name = self._model
        return at(sys.modules.get(module), name)

    def match(self, module: nn.Module) -> bool:
        wanted = self.wanted
        return wanted is not None and isinstance(module, wanted)

    def match_replaced(self, module: nn.Module) -> bool:
        """Whether ``apply`` gave it: it gives the model itself."""
        return self.match(module)

    def apply(self, module: nn.Module, enable_cuda_graph: bool = True) -> nn.Module:
        return module

    def attention(self, client_module: Any = None) -> Any:
        """(weights of query, key, value and of the projection behind, its bias, width, heads) of an attention of
        Diffusers; the first three fused if they have one width."""
        if client_module is None:
            return None
        q, k, v = (operands(client_module, name)[0] for name in ("to_q", "to_k", "to_v"))
        assert q is not None and k is not None and v is not None
        fused = torch.cat([q, k, v], 0) if q.shape == k.shape == v.shape else None
        weight, bias = operands(client_module, "to_out.0")
        kept = (None, None, None) if fused is not None else (q, k, v)
        return fused, *kept, weight, bias, q.shape[1], client_module.heads


class UNetPolicy(_DiffusersPolicy):
    _model = ("diffusers.models.unets.unet_2d_condition", "UNet2DConditionModel")


class VAEPolicy(_DiffusersPolicy):
    _model = ("diffusers.models.autoencoders.autoencoder_kl", "AutoencoderKL")


replace_policies = [
    HFBertLayerPolicy,
    HFGPTNEOLayerPolicy,
    GPTNEOXLayerPolicy,
    HFGPTJLayerPolicy,
    MegatronLayerPolicy,
    HFGPT2LayerPolicy,
    BLOOMLayerPolicy,
    HFOPTLayerPolicy,
    HFCLIPLayerPolicy,
    HFDistilBertLayerPolicy,
    LLAMALayerPolicy,
    LLAMA2LayerPolicy,
    InternLMLayerPolicy,
]
"""Of layers."""

generic_policies = [UNetPolicy, VAEPolicy]
"""Of whole models."""
