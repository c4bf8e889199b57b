"""Order in which transforms run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

MODULE_ORDER = (
    "layer_reduction", "expert_parallel", "tensor_parallel", "sparse_attention", "sequence_parallel",
    "compression", "quantized_linear", "lora", "fp8", "tiled_compute", "memory_budget", "native_products",
)  # fmt: skip
"""Default order of module transforms by name: first those that remove or split weights, then those that store them
differently, then those that add to them."""

INPUT_ORDER = ("curriculum", "sequence_parallel")
"""Default order of input transforms: sequences are truncated before they are sharded."""


class Ordered(Protocol):
    """Member of an order. Transforms named in ``after`` and ``before`` need not be present."""

    @property
    def name(self) -> str: ...
    @property
    def after(self) -> Sequence[str]: ...
    @property
    def before(self) -> Sequence[str]: ...


T = TypeVar("T", bound=Ordered)


def sort_transforms(transforms: Sequence[T], standard: Sequence[str], others: Iterable[str] = ()) -> list[T]:
    """Sort ``transforms`` by ``standard`` and their own constraints, otherwise stably.

    ``others``: further names that constraints may mention (transforms that ran before, names of the other kind).

    Raises:
        ValueError: a duplicate name, a constraint that names an unknown transform, or cyclic constraints.
    """
    names = [transform.name for transform in transforms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two transforms are named {twice!r}")
    known = {*standard, *names, *others}
    earlier: dict[str, set[str]] = {name: set() for name in names}
    for transform in transforms:
        _check_known(transform, known)
        earlier[transform.name].update(name for name in transform.after if name in earlier)
        for name in transform.before:
            if name in earlier:
                earlier[name].add(transform.name)
    for first, second in pairwise([name for name in standard if name in earlier]):
        earlier[second].add(first)
    result: list[T] = []
    left = list(transforms)
    while left:
        done = {transform.name for transform in result}
        chosen = next((t for t in left if earlier[t.name] <= done), None)
        if chosen is None:
            raise ValueError(f"no order is possible for {', '.join(t.name for t in left)}: {_why(left)}")
        left.remove(chosen)
        result.append(chosen)
    return result


def _check_known(transform: Ordered, known: set[str]) -> None:
    for side, names in (("after", transform.after), ("before", transform.before)):
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f": {', '.join(sorted(known))}"
                raise ValueError(
                    f"transform {transform.name!r} runs {side} {name!r}, which is not the name of a transform{hint}"
                )


def _why(transforms: Sequence[Ordered]) -> str:
    rules = [f"{t.name} after {name}" for t in transforms for name in t.after]
    rules += [f"{t.name} before {name}" for t in transforms for name in t.before]
    return f"{', '.join(rules)} (and the standard order)"
