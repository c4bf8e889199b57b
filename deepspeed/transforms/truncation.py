"""Sequence truncation by a curriculum, as an input transform (``docs/transforms.md``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deepspeed.data.curriculum_scheduler import CurriculumScheduler
from deepspeed.transforms.inputs import ForwardFacts

ARGUMENT = "curriculum_seqlen"
"""The documented keyword argument of models that truncate their sequences themselves."""
_TOKENS = ("input_ids", "inputs_embeds", "tokens")


@dataclass(frozen=True, eq=False)
class CurriculumLength:
    """Limits training sequences to the current difficulty, in tokens.

    A module with the argument ``curriculum_seqlen``, or one that takes any keyword argument and is no Transformers
    model, gets the length and truncates its sequences itself. For all others the inputs are truncated (:func:`cut`).
    """

    module: nn.Module
    scheduler: CurriculumScheduler
    name, after, before = "curriculum", (), ()

    def transform(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], facts: ForwardFacts
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Truncate the inputs, or pass the length. ValueError: there is no sequence among the inputs."""
        if not facts.training:
            return args, kwargs
        length = self.scheduler.update_difficulty(facts.step + 1)
        if takes_length(self.module):
            return args, {**kwargs, ARGUMENT: length}
        return cut((args, kwargs), length)


def takes_length(module: nn.Module) -> bool:
    """Return whether the module's forward takes ``curriculum_seqlen`` and truncates sequences itself."""
    parameters = inspect.signature(module.forward).parameters
    if ARGUMENT in parameters:
        return True
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return anything and not hasattr(getattr(module, "config", None), "get_text_config")


def cut(batch: Any, length: int) -> Any:
    """Truncate every sequence in ``batch`` (tensors in tuples, lists and dicts) to its first ``length`` positions.

    The batch size and length are read from ``input_ids``, ``inputs_embeds`` or ``tokens``, else from the first tensor
    of integers [batch, tokens] or of floats [batch, tokens, width]. All tensors [batch, tokens, ...] are truncated;
    attention masks [..., tokens, tokens] and [..., 1, tokens] in their last two dims, positions [tokens] and [axes,
    batch, tokens] in their last. Returns views, no copies.

    Raises:
        ValueError: no tensor looks like tokens.
    """
    named = _named(batch)
    tokens = named if named is not None else _first(batch)
    if tokens is None:
        raise ValueError(
            "the curriculum found no sequence to truncate: no input is named input_ids, inputs_embeds or "
            "tokens, or is an integer tensor [batch, tokens] or a float tensor [batch, tokens, width]. Add "
            f"an argument {ARGUMENT} to the model's forward and truncate the sequence there"
        )
    samples, whole = int(tokens.shape[0]), int(tokens.shape[1])
    if length >= whole:
        return batch

    def shorter(tensor: Tensor) -> Tensor:
        shape = tensor.shape
        if tensor.dim() == 1 and shape[0] == whole != samples:
            return tensor[:length]
        if tensor.dim() >= 3 and tuple(shape[-2:]) == (samples, whole) and not tensor.is_floating_point():
            return tensor[..., :length]
        if tensor.dim() >= 3 and shape[-1] == whole and shape[-2] in (1, whole) and shape[1] != whole:
            return tensor[..., :length, :length]
        if tuple(shape) == (whole, whole) != (samples, whole):
            return tensor[:length, :length]
        if tensor.dim() == 3 and tuple(shape[1:]) == (whole, whole) and not tensor.is_floating_point():
            return tensor[:, :length, :length]
        if tensor.dim() >= 2 and shape[1] == whole and shape[0] in (1, samples):
            return tensor[:, :length]
        return tensor

    return _each(batch, shorter)


def _named(value: Any) -> Tensor | None:
    if isinstance(value, dict):
        for name in _TOKENS:
            if isinstance(value.get(name), Tensor):
                return value[name]
    entries = _entries(value)
    return next((found for each in entries if (found := _named(each)) is not None), None)


def _first(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.dim() >= (3 if value.is_floating_point() else 2) else None
    return next((found for each in _entries(value) if (found := _first(each)) is not None), None)


def _entries(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (tuple, list)) else []


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to the tensors in ``value``. Containers keep their class if it can be built from entries."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _each(entry, change) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each(entry, change) for entry in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_each(entry, change) for entry in value)
    return value
