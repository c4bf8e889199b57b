"""Parts of a decoder of the common architecture, identified by module types and by what the modules' code reads.

The common architecture is an embedding; layers of norm, attention with rotary embedding, norm and gated MLP, each added
to its input; a norm; and a linear layer to the vocabulary. Examples: Llama, Mistral, Qwen 2 and 3, Phi-3.

Two checks exclude models of another architecture. A value that a module's code reads and that is unknown here (a clamp,
a cap of the logits) is refused, as it may affect only values that no trial covers. A model that reads the same names
but computes something else gives other logits in the trial (`runner.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.inference.cache.pages import LayerShape
from deepspeed.inference.kernels import HostLinear, IntegerLinear
from deepspeed.inference.model.attention import AttentionTerms
from deepspeed.inference.model.info import LayoutError
from deepspeed.ops.host_graph import Activation, GraphMatrix, Weights
from deepspeed.ops.transformer.products import NativeLinear

_LINEAR = (nn.Linear, NativeLinear, HostLinear, IntegerLinear)
DTYPES = (torch.float32, torch.bfloat16)
"""Of weights that the host's kernels read."""
_ROPE = {"default", "linear", "llama3", "yarn"}
"""Rotary types that do not depend on the sequence length."""
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
_READS = {
    "norm": "dtype to torch float32 pow mean rsqrt variance_epsilon weight",
    "mlp": "act_fn activation_fn gate_proj up_proj down_proj gate_up_proj chunk",
    "attention": (
        "shape head_dim q_proj k_proj v_proj qkv_proj o_proj q_norm k_norm view transpose apply_rotary_pos_emb update "
        "layer_idx ALL_ATTENTION_FUNCTIONS get_interface config _attn_implementation eager_attention_forward training "
        "attention_dropout scaling sliding_window getattr reshape contiguous num_attention_heads num_key_value_heads"
    ),
    "layer": (
        "input_layernorm self_attn post_attention_layernorm mlp resid_attn_dropout resid_mlp_dropout "
        "attention_type"
    ),
    "model": (
        "ValueError embed_tokens DynamicCache config get_seq_length torch arange shape device unsqueeze isinstance "
        "dict create_causal_mask create_sliding_window_causal_mask sliding_window has_sliding_layers layer_types "
        "enumerate rotary_emb layers num_hidden_layers norm BaseModelOutputWithPast attention_type"
    ),
    "head": (
        "model last_hidden_state isinstance int slice slice_logits_to_keep lm_head loss_function vocab_size config "
        "CausalLMOutputWithPast past_key_values hidden_states attentions"
    ),
}
"""Names that the forward of a module may read, by its role."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm."""

    module: nn.Module
    eps: float

    @property
    def weight(self) -> Tensor:
        return self.module.weight  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Layer:
    """``projections``: separate ones of queries, keys and values, or a fused one; ``gated``: likewise of gate and
    up."""

    before_attention: Norm
    projections: tuple[nn.Module, ...]
    query_norm: Norm | None
    key_norm: Norm | None
    output: nn.Module
    before_mlp: Norm
    gated: tuple[nn.Module, ...]
    activation: Activation
    down: nn.Module
    shape: LayerShape
    terms: AttentionTerms


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder. ``watch``: of all modules of the model."""

    watch: DecoderWatch
    embedding: nn.Embedding
    rotations: nn.Module
    layers: tuple[Layer, ...]
    norm: Norm
    head: nn.Module

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype


class DecoderWatch:
    """Checks that modules are unchanged since they were analyzed; runs before every forward, so it must be cheap."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._forwards = [(each.__dict__, harmless_forward(each)) for each in modules]
        self._hooks = [hooks for each in modules for hooks in (each._forward_pre_hooks, each._forward_hooks)]
        self._tensors = [
            (kind, name)
            for each in modules
            for kind in (each._parameters, each._buffers)
            for name, tensor in kind.items()
            if tensor is not None
        ]
        self._children = [(each._modules, tuple(each._modules.values())) for each in modules if each._modules]

    def addresses(self) -> list[int]:
        """Return the addresses of all weights; they change when weights are moved or replaced."""
        found = [kind.get(name) for kind, name in self._tensors]
        return [0 if tensor is None else tensor.data_ptr() for tensor in found]

    def is_disturbed(self) -> bool:
        """Return whether a module has hooks, or it or its forward has been replaced."""
        return (
            any(self._hooks)
            or any(
                found is not harmless
                for attributes, harmless in self._forwards
                if (found := attributes.get("forward")) is not None
            )
            or any(tuple(now.values()) != before for now, before in self._children)
        )


def decoder_of(
    module: nn.Module,
    shapes: Mapping[int, LayerShape],
    terms: Mapping[int, AttentionTerms],
    *,
    on_host: bool = True,
) -> Decoder:
    """Analyze ``module``, a causal model of Transformers. ``shapes`` and ``terms``: cache shapes and attention settings
    of its layers. ``on_host``: for the host's kernels, which support two kinds of weights.

    LayoutError: another architecture, or not on the host.
    """
    if on_host and any(each.device.type != "cpu" for each in module.parameters()):
        raise LayoutError("its weights are not on the host")
    found: Any = module
    _check(found, "head")
    _check(found.model, "model")
    layers = tuple(
        _layer(layer, shapes[index], terms[index])
        for index, layer in enumerate(_child(found.model, "layers"))
    )
    embedding = _child(found.model, "embed_tokens")
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        raise LayoutError(f"{type(embedding).__name__} is not a plain embedding")
    decoder = Decoder(
        DecoderWatch(found),
        embedding,
        _rotations(found.model),
        layers,
        _norm(found.model, "norm"),
        _linear(found, "lm_head"),
    )
    if on_host and decoder.dtype not in DTYPES:
        raise LayoutError(f"no kernels for weights of {decoder.dtype}")
    if decoder.watch.is_disturbed():
        raise LayoutError("some of its modules have hooks or another forward")
    return decoder


def matrix_of(linear: nn.Module) -> GraphMatrix:
    """Return the weights of ``linear`` for the kernels."""
    if isinstance(linear, IntegerLinear):
        return linear.matrix.described(linear.bias)
    assert isinstance(linear, nn.Linear)
    kind = Weights.FLOAT32 if linear.weight.dtype is torch.float32 else Weights.BFLOAT16
    return GraphMatrix(kind, linear.weight.detach(), linear.in_features, linear.bias)


def _layer(layer: Any, shape: LayerShape, terms: AttentionTerms) -> Layer:
    _check(layer, "layer")
    attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
    _check(attention, "attention")
    _check(mlp, "mlp")
    if terms.sinks is not None:
        raise LayoutError("its attention has sinks")
    activation = _ACTIVATIONS.get(getattr(attention.config, "hidden_act", None) or "")
    if activation is None:
        raise LayoutError("its activation is unknown")
    made = Layer(
        _norm(layer, "input_layernorm"),
        _linears(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        _norm(attention, "q_norm") if hasattr(attention, "q_norm") else None,
        _norm(attention, "k_norm") if hasattr(attention, "k_norm") else None,
        _linear(attention, "o_proj"),
        _norm(layer, "post_attention_layernorm"),
        _linears(mlp, ("gate_proj", "up_proj"), "gate_up_proj"),
        activation,
        _linear(mlp, "down_proj"),
        shape,
        terms,
    )
    kinds = [{matrix_of(each).kind for each in some} for some in (made.projections, made.gated)]
    if any(len(each) > 1 for each in kinds):
        raise LayoutError("layers with the same input have different kinds of weights")
    return made


def _rotations(model: Any) -> nn.Module:
    module = _child(model, "rotary_emb")
    kind = getattr(module, "rope_type", None)
    if kind not in _ROPE:
        raise LayoutError(f"its rotations of type {kind} may depend on the length of a sequence")
    return module


def _norm(parent: nn.Module, name: str) -> Norm:
    module: Any = _child(parent, name)
    _check(module, "norm")
    return Norm(module, float(module.variance_epsilon))


def _linear(parent: nn.Module, name: str) -> nn.Module:
    module = _child(parent, name)
    if type(module) not in _LINEAR:
        raise LayoutError(f"{name} is a {type(module).__name__}, not a plain linear layer")
    if isinstance(module, nn.Linear) and not module.weight.is_contiguous():
        raise LayoutError(f"the weight of {name} is not row-major")
    return module


def _linears(parent: nn.Module, separate: Sequence[str], fused: str) -> tuple[nn.Module, ...]:
    """Return the ``separate`` layers, or else the one that computes all of them."""
    return tuple(_linear(parent, name) for name in (separate if hasattr(parent, separate[0]) else (fused,)))


def _child(parent: nn.Module, name: str) -> Any:
    found = parent._modules.get(name)
    if found is None:
        raise LayoutError(f"{type(parent).__name__} has no {name}")
    return found


def _check(module: nn.Module, role: str) -> None:
    """Check what a module's forward reads. LayoutError: a name that modules of this role do not read."""
    reads = inspect.unwrap(type(module).forward).__code__.co_names
    unknown = sorted(set(reads) - set(_READS[role].split()))
    if unknown:
        raise LayoutError(f"{type(module).__name__} reads {', '.join(unknown)}")


# Hooks on modules, and replacements of their forward.

_TRL = "trl.trainer.utils", "_fused_forward"
"""Module and name of the function with which TRL's trainers replace a model's forward."""
_ORIGINAL = "original_forward"
"""The variable of its closure that holds the original forward."""


def has_hooks(module: nn.Module) -> bool:
    """Return whether this module itself has hooks, regardless of its submodules."""
    found = vars(module).get("forward")
    hooked = module._forward_pre_hooks or module._forward_hooks
    return bool(hooked) or (found is not None and harmless_forward(module) is not found)


def harmless_forward(module: nn.Module) -> Any:
    """Return the function that replaces the module's forward, if it calls the original unchanged whenever logits are
    requested; else None. TRL's trainers use such a function, which computes log-probabilities of given tokens without
    the logits if an argument asks for it."""
    found = vars(module).get("forward")
    function: Any = getattr(found, "__func__", None)
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or (names.get("__name__"), code.co_name) != _TRL or _ORIGINAL not in code.co_freevars:
        return None
    original = function.__closure__[code.co_freevars.index(_ORIGINAL)].cell_contents
    own = getattr(original, "__func__", None) is type(module).forward and original.__self__ is module
    return found if own else None
