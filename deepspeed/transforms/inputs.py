"""Transforms of a forward's inputs, such as sharding or truncating sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed.transforms.errors import TransformError
from deepspeed.transforms.ordering import INPUT_ORDER, MODULE_ORDER, Ordered, sort_transforms


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFacts:
    """State at a forward. ``training``: the module's mode; ``step``: optimizer steps done so far; ``micro_step``:
    micro-batches done so far."""

    training: bool
    step: int
    micro_step: int


class InputTransform(Ordered, Protocol):
    """Changes the arguments of every ``engine(...)``, in training and in evaluation.

    ``name``, ``after`` and ``before`` define its position among the others, as for a ``ModuleTransform``.
    """

    def transform(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], facts: ForwardFacts
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the module, before they are cast. Must not modify the caller's tensors or dicts."""
        ...


class InputChain:
    """Applies input transforms in order. ValueError: their constraints have no order."""

    def __init__(self, transforms: Sequence[InputTransform]) -> None:
        self.transforms = sort_transforms(transforms, INPUT_ORDER, others=MODULE_ORDER)

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool, step: int, micro_step: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Transform the arguments; keywords are the fields of ``ForwardFacts``. TransformError: a transform failed; it
        is named."""
        facts = ForwardFacts(training=training, step=step, micro_step=micro_step)
        for each in self.transforms:
            try:
                args, kwargs = each.transform(args, kwargs, facts)
            except Exception as error:
                raise TransformError(
                    f"input transform {each.name!r} failed: {type(error).__name__}: {error}"
                ) from error
        return args, kwargs
