"""Bytes alive while a profile runs: every storage that an operation makes, until it is freed.

Storages are followed by weak references, so that what the script keeps, autograd keeps or a module returns is seen
alike. On the meta device a storage has a size and no memory: the numbers are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(slots=True)
class MemorySpan:
    """A module that runs: the bytes that were alive when it began, and the most since."""

    base: int
    most: int


class LiveBytes:
    """Parameters, buffers and what there was before are not counted: only what the model makes."""

    def __init__(self, model: nn.Module) -> None:
        self.now = 0
        self.spans: list[MemorySpan] = []
        self._known: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._follow(tensor, counted=False)

    def enter(self) -> None:
        self.spans.append(MemorySpan(self.now, self.now))

    def leave(self) -> tuple[int, int]:
        """Close the innermost span and return (bytes that it made and left alive, the most that were alive at once in
        it).
        """
        span = self.spans.pop()
        if self.spans and span.most > self.spans[-1].most:
            self.spans[-1].most = span.most
        return max(0, self.now - span.base), span.most - span.base

    def see(self, made: Any, arguments: Iterable[Any]) -> None:
        """``made``: what an operation returned for these arguments, with which it may share storage."""
        for tensor in (made,) if isinstance(made, Tensor) else _tensors(made):
            key = _key(tensor)
            if key is None or key in self._known:
                continue
            others = any(_key(other) == key for other in _tensors(arguments))
            self._follow(tensor, counted=not others)
        if self.spans and self.now > self.spans[-1].most:
            self.spans[-1].most = self.now

    def _follow(self, tensor: Tensor, *, counted: bool) -> None:
        key = _key(tensor)
        if key is None:
            return
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes() if counted else 0

        def freed(_: Any, key: int = key, nbytes: int = nbytes) -> None:
            if self._known.pop(key, None) is not None:
                self.now -= nbytes

        self._known[key] = weakref.ref(storage, freed)
        self.now += nbytes

    def end(self) -> None:
        self._known.clear()


def _key(tensor: Tensor) -> int | None:
    """Return the key of the tensor's storage, valid as long as that lives; None: it has none of its own."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
