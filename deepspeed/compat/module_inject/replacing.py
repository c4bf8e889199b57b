"""Layers of a model prepared in place, without an engine to keep."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.compat.module_inject.inject import module_inject
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.inference.config import DeepSpeedInferenceConfig
from deepspeed.inference.engine import InferenceEngine

_OF_TRAINING = "micro_batch_size"


def replace_transformer_layer(
    orig_layer_impl: Any,
    model: nn.Module,
    checkpoint_dict: dict[str, Any] | None = None,
    config: Any = None,
    model_config: Any = None,
    **training: Any,
) -> nn.Module:
    """Prepare ``model`` for inference as ``config`` says, in place; the model.

    Args:
        orig_layer_impl: the class of the layers. All layers are found by the model's graph.
        model: the model.
        checkpoint_dict: where its weights are, as ``checkpoint`` of ``init_inference``.
        config: a ``DeepSpeedInferenceConfig``, or a dict of its keys.
        model_config: the model's own config. It is not needed.
        training: arguments of older releases, with ``micro_batch_size`` and the model's config as ``bert_config`` or
            ``config``: ``orig_layer_impl`` is replaced by training layers (see ``module_inject``).

    Raises:
        DeepSpeedConfigError: the config asks for what cannot be done.
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
            f"config is a {type(config).__name__}: give a DeepSpeedInferenceConfig, or micro_batch_size= and "
            "bert_config= for training layers"
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
    """``huggingface``: what a layer returns follows from its class; ``local_rank``: from the device of its weights."""
    shape = bert_config if bert_config is not None else config
    length = max_seq_length or getattr(shape, "max_position_embeddings", 512)
    return module_inject(
        layer, model, shape, micro_batch_size, length, seed, preln, fp16, stochastic_mode=stochastic_mode
    ).train(training)
