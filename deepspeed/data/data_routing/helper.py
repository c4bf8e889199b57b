"""Conversion of a model's layers to drop tokens, and state dicts without the wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from deepspeed.data.data_routing.basic_layer import LAYER, RandomLayerTokenDrop


def convert_to_random_ltd(model: Any, convert_type: type[nn.Module] | tuple[type[nn.Module], ...]) -> Any:
    """Wrap the layers of class ``convert_type`` in a model or an engine's module, in place; return ``model``.

    The layers in ``random_ltd_layer_id`` then drop tokens in training: immediately if ``model`` is an engine, from
    the next forward if it is an engine's module, otherwise once ``deepspeed.initialize`` gets it. Converted layers
    that no engine with that section has claimed warn once that they drop nothing.

    ValueError: no layer is of that class, or the engine's config does not fit the layers.
    """
    root = _module_of(model)
    found = [
        name
        for name, each in root.named_modules()
        if isinstance(each, convert_type) and (not name or not _is_wrapped(root, name))
    ]
    names = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    wrapped = any(isinstance(each, RandomLayerTokenDrop) for each in root.modules())
    if "" in found or not (names or wrapped):
        kinds = convert_type if isinstance(convert_type, tuple) else (convert_type,)
        raise ValueError(
            f"convert_to_random_ltd: {type(root).__name__} has no layer of class "
            f"{' or '.join(kind.__name__ for kind in kinds)} inside it: pass the class of the stacked layers"
        )
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(root.get_submodule(parent), leaf, RandomLayerTokenDrop(root.get_submodule(name)))
    if root is not model:
        initialize = getattr(model, "random_ltd_initialize", None)
        if initialize is not None:
            initialize()
    return model


def save_without_random_ltd(model: Any) -> dict[str, Any]:
    """Return the state dict of a model or an engine's module, with the names of the unwrapped model."""
    return remove_random_ltd_state_dict(_module_of(model).state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` with the names of the unwrapped model."""
    return {name.replace(f".{LAYER}", ""): value for name, value in state_dict.items()}


def _module_of(model: Any) -> nn.Module:
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def _is_wrapped(root: nn.Module, name: str) -> bool:
    return isinstance(root.get_submodule(name), RandomLayerTokenDrop)
