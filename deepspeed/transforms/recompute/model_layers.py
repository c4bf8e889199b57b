"""``cpu_checkpointing`` for models that checkpoint their layers themselves, as those of Transformers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

SWITCH = "gradient_checkpointing"
"""The attribute of a module that says whether it runs under ``torch.utils.checkpoint``."""


def keep_inputs_of_layers(
    module: nn.Module, keeping: Callable[[], AbstractContextManager[None]]
) -> list[Any]:
    """Enter ``keeping()`` around each call of a checkpointed layer of ``module``. Returns handles of hooks.

    What a checkpoint inside saves for itself does not reach a context around it, its inputs do.
    """
    handles: list[Any] = []
    for layer in _checkpointed(module):
        handles += _around(layer, keeping)
    return handles


def _checkpointed(module: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules with the switch: layers, or a model that calls the checkpoint for its layers."""
    for each in module.modules():
        below = (child for child in each.modules() if child is not each)
        if hasattr(each, SWITCH) and not any(hasattr(child, SWITCH) for child in below):
            yield each


def _around(layer: nn.Module, keeping: Callable[[], AbstractContextManager[None]]) -> tuple[Any, Any]:
    open_calls: list[AbstractContextManager[None] | None] = []

    def enter(layer: nn.Module, args: Any) -> None:
        context = keeping() if getattr(layer, SWITCH) and layer.training and torch.is_grad_enabled() else None
        open_calls.append(context)
        if context is not None:
            context.__enter__()

    def leave(layer: nn.Module, args: Any, outputs: Any) -> None:
        context = open_calls.pop() if open_calls else None
        if context is not None:
            context.__exit__(None, None, None)

    return layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)
