"""Round-trip check: compare the structure of a written file with what was saved, and name the first difference.

Most of a checkpoint is of types known to round-trip (``is_plain``); the rest, mostly client state, is compared.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LEAVES = {str, int, float, bool, type(None)}
_SEQUENCES = {list, tuple, torch.Size}
_MAPPINGS = {dict, OrderedDict}
_KEYS = {str, int}
_DTYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
_MAX_INT_BITS = 2000  # torch's unpickler reads at most 255 bytes


def is_plain(value: Any, lazy: type) -> bool:
    """Return whether ``value`` is known to load back equal: numbers, ASCII text and strided or ``lazy`` tensors in
    lists, tuples and dicts, of exactly these types and without cycles. False if unknown."""
    inside: list[tuple[int, Iterator[Any]]] = [(0, iter((value,)))]  # the enclosing containers
    around = {0}
    while inside:
        for item in inside[-1][1]:  # no call per item: there may be one per parameter
            kind = type(item)
            if kind in _LEAVES:
                if (kind is str and not item.isascii()) or (
                    kind is int and item.bit_length() > _MAX_INT_BITS
                ):
                    return False
            elif kind is Tensor or kind is lazy:
                if item.dtype not in _DTYPES or (kind is Tensor and not is_strided(item)):
                    return False
            else:
                parts = _plain_parts(item, kind)
                if parts is None or id(item) in around:
                    return False
                inside.append((id(item), iter(parts)))
                around.add(id(item))
                break
        else:
            around.discard(inside.pop()[0])
    return True


def is_strided(tensor: Tensor) -> bool:
    """Return whether a tensor has plain memory of its own: not sparse, quantized or on the meta device."""
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _plain_parts(value: Any, kind: type) -> Iterable[Any] | None:
    """Return the items of a known container, keys included; None for any other type."""
    if kind in _SEQUENCES:
        return value
    if kind in _MAPPINGS and set(map(type, value)) <= _KEYS:
        attributes = vars(value) if kind is OrderedDict else {}  # a state dict keeps its metadata there
        return chain(value, value.values(), (attributes,) if attributes else ())
    return None


def failing_part(content: Any, fails: Callable[[Any], bool]) -> str:
    """Return the key path of the innermost part of ``content`` for which ``fails`` is true; "" for ``content``
    itself."""
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
    """Return a key path with the outermost key as the client wrote it: ``'epoch'`` for ``['epoch']``."""
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


def difference(
    saved: Any, loaded: Any, lazy: type, path: str = "", seen: set[tuple[int, int]] | None = None
) -> tuple[str, str] | None:
    """Return the key path and a description of the first difference between ``saved`` and ``loaded``, types included;
    None if equal. Tensor values are not compared; a ``lazy`` one loads as a tensor.

    ``path``: of the two in what is compared; ``seen``: pairs that are being compared, for cycles.
    """
    seen = set() if seen is None else seen
    if isinstance(saved, (lazy, Tensor)):
        return _tensors_differ(saved, loaded, path)
    if isinstance(saved, (torch.UntypedStorage, torch.TypedStorage)):
        return path, "is a bare storage; save tensors instead"
    if type(saved) is not type(loaded):
        return path, f"is a {_name(saved)} and would load as a {_name(loaded)}"
    if saved is loaded or (id(saved), id(loaded)) in seen:
        return None
    seen.add((id(saved), id(loaded)))
    if not _has_parts(saved):
        same = _equal(saved, loaded)
        return None if same else (path, f"is {saved!r:.200} and would load as {loaded!r:.200}")
    if is_plain(saved, lazy):
        return None
    own, found = list(_children(saved)), list(_children(loaded))
    if len(own) != len(found) or getattr(saved, "maxlen", None) != getattr(loaded, "maxlen", None):
        return path, f"has {len(own)} items, but only {len(found)} would be loaded"
    for (step, part), (_, other) in zip(own, found, strict=True):
        problem = difference(part, other, lazy, path + step, seen)
        if problem is not None:
            return problem
    return None


def _has_parts(value: Any) -> bool:
    if isinstance(value, (set, frozenset)):
        return False  # unordered
    return isinstance(value, (Mapping, list, tuple, deque)) or (
        hasattr(value, "__dict__") and not isinstance(value, (type, np.ndarray)) and not callable(value)
    )


def _tensors_differ(saved: Any, loaded: Any, path: str) -> tuple[str, str] | None:
    if not isinstance(loaded, Tensor) or (isinstance(saved, Tensor) and type(saved) is not type(loaded)):
        return path, f"is a {_name(saved)} and would load as a {_name(loaded)}"
    if tuple(saved.shape) != tuple(loaded.shape) or saved.dtype != loaded.dtype:
        found = f"{loaded.dtype}, {tuple(loaded.shape)}"
        return path, f"is {saved.dtype}, {tuple(saved.shape)}, and would load as {found}"
    marks = (loaded.layout, loaded.requires_grad)
    if isinstance(saved, Tensor) and (saved.layout, saved.requires_grad) != marks:
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
        return True  # a class allowed by the client, without contents to compare
    return bool(saved == loaded) or repr(saved) == repr(loaded)


def _name(value: Any) -> str:
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
