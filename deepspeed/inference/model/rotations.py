"""Rotary embeddings that depend on the length of the whole sequence (longrope).

Up to the original length all tokens of a sequence are rotated by one set of frequencies, beyond it by another, which
the rotary module selects by the largest position in its input. So sequences on different sides of that length cannot
share a forward, a chunk of a long prompt must be rotated as the whole prompt will be, and a sequence that grows past
the length is recomputed, as in Transformers' ``generate``. The *span* of a sequence is the number of such lengths that
it exceeds: sequences of one span are rotated alike.
"""

from __future__ import annotations

import contextlib
import inspect
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.inference.model.info import LayoutError

_SWITCHING = frozenset({"longrope", "su"})
"""Types with two sets of frequencies. Type "dynamic" changes only beyond the model's maximum length, which no sequence
reaches here."""


class Rotations:
    """The rotary modules of ``module`` that switch frequencies, and the lengths at which they do.

    Attributes:
        lengths: ascending; past each one, all tokens of a sequence are rotated differently.
        restarts: whether ``generate`` recomputes a sequence that grows past one of them.

    Raises:
        LayoutError: the config names such rotations, but no module is known to switch by position.
    """

    def __init__(self, module: nn.Module, config: Any) -> None:
        self._modules: list[nn.Module] = []
        lengths: set[int] = set()
        for each in module.modules():
            kinds = getattr(each, "rope_type", None)
            found = _original_lengths(kinds, getattr(each, "config", config))
            if found:
                self._modules.append(each)
                lengths |= found
        self.lengths = tuple(sorted(lengths))
        if not lengths and (told := set(_kinds(_parameters(config))) & _SWITCHING):
            raise LayoutError(
                f"{type(module).__name__} has rotations of type {told.pop()} in custom modules, so it is "
                "unknown when they depend on the sequence length"
            )
        prepare: Any = getattr(type(module), "prepare_inputs_for_generation", None)
        names = () if prepare is None else inspect.unwrap(prepare).__code__.co_names
        self.restarts = "original_max_position_embeddings" in names

    def span(self, length: int) -> int:
        """Return the span of a sequence of ``length`` tokens."""
        return bisect_left(self.lengths, length)

    def check_growth(self, length: int, longest: int) -> None:
        """Raise ValueError if a sequence of ``length`` tokens may not grow to ``longest``, because ``generate`` would
        keep using keys rotated for the short sequence."""
        if not self.restarts and self.span(length) != self.span(longest):
            raise ValueError(
                f"a sequence of {length} tokens would grow to {longest}, beyond the "
                f"{self.lengths[self.span(length)]} where its rotations (longrope) change, and generate() "
                "of this model does not recompute it: request fewer tokens, or pass a longer prompt"
            )

    @contextlib.contextmanager
    def of_span(self, span: int) -> Iterator[None]:
        """Rotate everything computed within the block as in sequences of ``span``, whatever the positions."""
        if not span:
            yield
            return
        shown = self.lengths[span - 1]  # the first position past the length selects the other frequencies

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if "position_ids" in kwargs:
                return args, {**kwargs, "position_ids": _with_last(kwargs["position_ids"], shown)}
            return (args[0], _with_last(args[1], shown), *args[2:]), kwargs

        def after(_: nn.Module, __: Any, made: tuple[Tensor, Tensor]) -> Any:
            return tuple(each[..., :-1, :] for each in made)

        handles: list[Any] = []
        try:
            for each in self._modules:
                handles.append(each.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(each.register_forward_hook(after))
            yield
        finally:
            for handle in handles:
                handle.remove()


def _with_last(positions: Tensor, last: int) -> Tensor:
    return torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), last)], dim=-1)


def _parameters(config: Any) -> Any:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)


def _kinds(parameters: Any) -> Iterator[str]:
    """Yield the rotation types in a config, with one set of parameters or one per layer type."""
    if not isinstance(parameters, Mapping):
        return
    kind = parameters.get("rope_type", parameters.get("type"))
    if isinstance(kind, str):
        yield kind
        return
    for each in parameters.values():
        yield from _kinds(each)


def depends_on_length(module: nn.Module) -> bool:
    """Return whether rotations depend on the longest sequence of the batch; True if unknown."""
    try:
        return bool(Rotations(module, getattr(module, "config", None)).lengths)
    except LayoutError:
        return True


def _original_lengths(kinds: Any, config: Any) -> set[int]:
    """Return the lengths at which a rotary module of these types (one, or a dict by layer type) switches."""
    parameters = _parameters(config)
    if isinstance(kinds, Mapping):
        return {
            int(parameters[layer]["original_max_position_embeddings"])
            for layer, kind in kinds.items()
            if kind in _SWITCHING
        }
    if not isinstance(kinds, str) or kinds not in _SWITCHING:
        return set()
    told = parameters.get("original_max_position_embeddings")
    return {int(told or config.original_max_position_embeddings)}
