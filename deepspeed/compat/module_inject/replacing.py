"""In-place conversion of a model's layers, for callers that keep no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.inference.config import DeepSpeedInferenceConfig
from deepspeed.inference.engine import InferenceEngine
from deepspeed.ops.transformer.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

_OF_TRAINING = "micro_batch_size"


def replace_transformer_layer(
    orig_layer_impl: Any,
    model: nn.Module,
    checkpoint_dict: dict[str, Any] | None = None,
    config: Any = None,
    model_config: Any = None,
    **training: Any,
) -> nn.Module:
    """Prepare ``model`` for inference by ``config``, in place, and return it.

    Args:
        orig_layer_impl: the class of the layers. For inference it is not needed: layers are found by the model's graph.
        model: the model.
        checkpoint_dict: the checkpoint to load, as ``checkpoint`` of ``init_inference``.
        config: a ``DeepSpeedInferenceConfig``, or a dict of its keys.
        model_config: the model's config; not needed.
        training: arguments of older releases: with ``micro_batch_size``, and the model's config as ``bert_config`` or
            ``config``, layers of class ``orig_layer_impl`` are replaced by training layers (see ``module_inject``).

    Raises:
        DeepSpeedConfigError: the config asks for something unsupported.
        TypeError: an argument is unknown.
    """
    if _OF_TRAINING in training:
        return _for_training(orig_layer_impl, model, config, **training)
    if training:
        raise TypeError(f"replace_transformer_layer() has no argument {next(iter(training))!r}")
    if config is None:
        config = DeepSpeedInferenceConfig()
    elif isinstance(config, dict):
        config = DeepSpeedInferenceConfig(**config)
    elif not isinstance(config, DeepSpeedInferenceConfig):
        raise DeepSpeedConfigError(
            f"config is a {type(config).__name__}: pass a DeepSpeedInferenceConfig, or micro_batch_size= "
            "and bert_config= for training layers"
        )
    if checkpoint_dict is not None:
        config = config.model_copy(update={"checkpoint": checkpoint_dict})
    module: nn.Module = InferenceEngine(model, config).module
    return module


def _for_training(
    layer: type[nn.Module],
    model: nn.Module,
    config: Any,
    *,
    micro_batch_size: int,
    bert_config: Any = None,
    seed: int = -1,
    max_seq_length: int | None = None,
    preln: bool = True,
    fp16: bool = True,
    huggingface: bool = False,
    local_rank: int = -1,
    stochastic_mode: bool = False,
    training: bool = True,
) -> nn.Module:
    """Replace layers for training. ``huggingface`` and ``local_rank`` have no effect: what a layer returns follows from
    its class, its device from its weights."""
    shape = bert_config if bert_config is not None else config
    length = max_seq_length or getattr(shape, "max_position_embeddings", 512)
    return module_inject(
        layer, model, shape, micro_batch_size, length, seed, preln, fp16, stochastic_mode=stochastic_mode
    ).train(training)


# Training layers instead of BERT's, and back.


def module_inject(
    layer_obj: type[nn.Module],
    model: nn.Module,
    config: Any,
    micro_batch_size: int,
    max_seq_length: int,
    seed: int,
    preln: bool,
    fp16: bool = True,
    **options: Any,
) -> nn.Module:
    """Replace each layer of a BERT-like model by a `DeepSpeedTransformerLayer` with the same weights.

    Args:
        layer_obj: the class of the layers.
        model: the model.
        config: its config, with BERT's attribute names: ``hidden_size``, ``num_attention_heads`` and so on.
        micro_batch_size, max_seq_length, seed, fp16: as for `DeepSpeedTransformerConfig`.
        preln: pre-norm layers, whose norms are called ``PreAttentionLayerNorm`` and ``PostAttentionLayerNorm``.
        options: further arguments of that config, such as ``gelu_checkpoint=True``.

    Returns:
        The model.

    Raises:
        ValueError: the model has no such layer.
    """
    wanted = DeepSpeedTransformerConfig(
        batch_size=micro_batch_size,
        max_seq_length=max_seq_length,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        heads=config.num_attention_heads,
        attn_dropout_ratio=config.attention_probs_dropout_prob,
        hidden_dropout_ratio=config.hidden_dropout_prob,
        num_hidden_layers=config.num_hidden_layers,
        initializer_range=config.initializer_range,
        layer_norm_eps=getattr(config, "layer_norm_eps", 1e-12),
        seed=seed,
        fp16=fp16,
        pre_layer_norm=preln,
        **options,
    )

    def make(old: nn.Module) -> nn.Module:
        weights, biases = zip(
            *((p.weight.detach(), p.bias.detach()) for p in _parts(old, preln)), strict=True
        )
        new = DeepSpeedTransformerLayer(wanted, weights, biases)
        return new.to(weights[0].device, weights[0].dtype).train(old.training)

    _replace(model, layer_obj, make)
    return model


def revert_layers(
    orig_layer_impl: Callable[..., nn.Module], model: nn.Module, config: Any, preln: bool = False
) -> nn.Module:
    """Undo `module_inject`: put back layers ``orig_layer_impl(config)`` with the trained weights. Returns the model.

    Raises:
        ValueError: the model has no `DeepSpeedTransformerLayer`.
    """

    def make(old: nn.Module) -> nn.Module:
        assert isinstance(old, DeepSpeedTransformerLayer)
        new = orig_layer_impl(config)
        with torch.no_grad():
            for part, weight, bias in zip(_parts(new, preln), *old.parts(), strict=True):
                part.weight.copy_(weight)
                part.bias.copy_(bias)
        like = old.parts()[0][0]
        return new.to(like.device, like.dtype).train(old.training)

    _replace(model, DeepSpeedTransformerLayer, make)
    return model


def _parts(layer: Any, preln: bool) -> Iterator[Any]:
    """Yield the eight parts of a BERT layer, in the order in which `DeepSpeedTransformerLayer` takes them."""
    attention = layer.attention.self
    yield from (attention.query, attention.key, attention.value, layer.attention.output.dense)
    yield layer.PostAttentionLayerNorm if preln else layer.attention.output.LayerNorm
    intermediate = layer.intermediate
    yield getattr(intermediate, "dense_act", None) or intermediate.dense
    yield layer.output.dense
    yield layer.PreAttentionLayerNorm if preln else layer.output.LayerNorm


def _replace(model: nn.Module, kind: type[nn.Module], make: Callable[[nn.Module], nn.Module]) -> None:
    found = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, kind)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no layers of class {kind.__name__}")
    for path, layer in found:
        model.set_submodule(path, make(layer))
