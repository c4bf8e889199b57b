"""What is saved must load back equal: compares the structure of a file with what was saved, and names what differs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def difference(saved: Any, loaded: Any, is_tensor: Callable[[Any], bool]) -> tuple[str, str] | None:
    """Key path and description of the first part of ``loaded`` that differs from ``saved``, types included; None if
    there is none. Tensors are compared without their values; ``is_tensor`` says what becomes one."""
    return _Comparison(is_tensor).compare(saved, loaded, "")


def culprit(content: Any, fails: Callable[[Any], bool]) -> str:
    """Key path of the innermost part of ``content`` for which ``fails`` holds; "" for ``content`` itself."""
    path, value, seen = "", content, {id(content)}
    while True:
        for step, child in _children(value):
            if id(child) not in seen and fails(child):
                path, value = path + step, child
                seen.add(id(child))
                break
        else:
            return readable(path)


def readable(path: str) -> str:
    """``'epoch'`` for ``['epoch']``: the outermost key as the client wrote it."""
    inside, bracket, rest = path[1:].partition("]")
    return inside + rest if path.startswith("[") and bracket else path


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{key!r}]", item
        for key in value:
            yield f" (the key {key!r:.80})", key
        if isinstance(value, defaultdict):
            yield ".default_factory", value.default_factory
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{place}]", item) for place, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"{{{item!r:.80}}}", item) for item in value)
    if not isinstance(value, (type, Tensor)) and hasattr(value, "__dict__"):
        yield from ((f".{name}", item) for name, item in vars(value).items())


class _Comparison:
    def __init__(self, is_tensor: Callable[[Any], bool]) -> None:
        self.is_tensor = is_tensor
        self.seen: set[tuple[int, int]] = set()

    def compare(self, saved: Any, loaded: Any, path: str) -> tuple[str, str] | None:
        if self.is_tensor(saved) or isinstance(saved, Tensor):
            return self._tensors(saved, loaded, path)
        if isinstance(saved, (torch.UntypedStorage, torch.TypedStorage)):
            return path, "is one of those bare storages; save tensors instead"
        if type(saved) is not type(loaded):
            return path, f"is a {_name(saved)} and would load as a {_name(loaded)}"
        if saved is loaded or (id(saved), id(loaded)) in self.seen:
            return None
        self.seen.add((id(saved), id(loaded)))
        if not self._has_parts(saved):
            return (
                None
                if _equal(saved, loaded)
                else (path, f"is {saved!r:.200} and would load as {loaded!r:.200}")
            )
        own, found = list(_children(saved)), list(_children(loaded))
        if len(own) != len(found) or getattr(saved, "maxlen", None) != getattr(loaded, "maxlen", None):
            return path, f"has {len(own)} parts, of which {len(found)} would be loaded"
        for (step, part), (_, other) in zip(own, found, strict=True):
            problem = self.compare(part, other, path + step)
            if problem is not None:
                return problem
        return None

    @staticmethod
    def _has_parts(value: Any) -> bool:
        if isinstance(value, (set, frozenset)):
            return False  # in any order
        return isinstance(value, (Mapping, list, tuple, deque)) or (
            hasattr(value, "__dict__") and not isinstance(value, (type, np.ndarray)) and not callable(value)
        )

    @staticmethod
    def _tensors(saved: Any, loaded: Any, path: str) -> tuple[str, str] | None:
        if not isinstance(loaded, Tensor) or (isinstance(saved, Tensor) and type(saved) is not type(loaded)):
            return path, f"is a {_name(saved)} and would load as a {_name(loaded)}"
        if tuple(saved.shape) != tuple(loaded.shape) or saved.dtype != loaded.dtype:
            return (
                path,
                f"is {saved.dtype}, {tuple(saved.shape)}, and would load as {loaded.dtype}, {tuple(loaded.shape)}",
            )
        if isinstance(saved, Tensor) and (saved.layout, saved.requires_grad) != (
            loaded.layout,
            loaded.requires_grad,
        ):
            return path, f"would load with {loaded.layout}, requires_grad={loaded.requires_grad}"
        return None


def _equal(saved: Any, loaded: Any) -> bool:
    if isinstance(saved, (np.ndarray, np.generic)):
        one, other = np.asarray(saved), np.asarray(loaded)
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(saved, (float, complex)):
        return repr(saved) == repr(loaded)  # NaN, and the sign of zero
    if isinstance(saved, (set, frozenset)):
        return saved == loaded or sorted(map(repr, saved)) == sorted(map(repr, loaded))
    if type(saved).__eq__ is object.__eq__:
        return True  # of a class that the client allowed, with nothing in it that could differ
    return bool(saved == loaded) or repr(saved) == repr(loaded)


def _name(value: Any) -> str:
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
