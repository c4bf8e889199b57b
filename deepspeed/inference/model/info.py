"""Properties of a causal model of Transformers that the runner needs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.base.exceptions import ExplainedError

DEFAULT_LENGTH = 2048
"""Maximum tokens of a request with its result, if unset and the model supports more."""

_ATTENTION = {"full_attention", "sliding_attention"}


class LayoutError(ExplainedError, ValueError):
    """A model cannot run in a layout, or in any."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """``arguments``: of the model's forward. ``sliding_layers``: number of layers with a window; None: the config does
    not list its layers. ``max_length``: positions of the model; None: unknown. ``stop_token_ids``: tokens that end a
    text."""

    name: str
    config: Any
    arguments: frozenset[str]
    layers: int
    sliding_layers: int | None
    vocab_size: int
    max_length: int | None
    stop_token_ids: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, module: nn.Module) -> ModelInfo:
        """Read the properties. LayoutError: not a causal language model of Transformers, or a layer is not
        attention."""
        name = type(module).__name__
        config: Any = getattr(module, "config", None)
        if config is None or not hasattr(config, "get_text_config"):
            raise LayoutError(f"{name} has no Transformers config")
        if config.is_encoder_decoder or module.get_output_embeddings() is None:  # type: ignore[operator]
            raise LayoutError(f"{name} is not a causal language model: use its own generate()")
        text = config.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None)
        other = sorted(set(kinds or ()) - _ATTENTION)
        if other:
            raise LayoutError(
                f"{name} has layers of type {', '.join(other)}, whose state is not a key-value cache"
            )
        first = next(module.parameters())
        return cls(
            name=name,
            config=text,
            arguments=frozenset(inspect.signature(module.forward).parameters),
            layers=int(text.num_hidden_layers),
            sliding_layers=None if not kinds else sum(kind == "sliding_attention" for kind in kinds),
            vocab_size=int(text.vocab_size),
            max_length=getattr(text, "max_position_embeddings", None),
            stop_token_ids=_stop_tokens(module, text),
            device=first.device,
        )


def _stop_tokens(module: nn.Module, config: Any) -> tuple[int, ...]:
    """Return the end tokens of the model's generation config, else of its config."""
    for source in (getattr(module, "generation_config", None), config):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()
