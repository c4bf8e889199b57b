"""The documented name of taking training layers out again; layers of inference are `init_inference`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from deepspeed.module_inject.inject import revert_layers


def revert_transformer_layer(
    orig_layer_impl: Callable[..., nn.Module], model: nn.Module, config: Any, preln: bool = False
) -> nn.Module:
    """Put ``orig_layer_impl(config)`` with the same weights in the place of each `DeepSpeedTransformerLayer`; the
    model. ValueError: it has none."""
    return revert_layers(orig_layer_impl, model, config, preln)
