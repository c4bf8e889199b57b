"""Nested dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def rebuilt(item: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``item`` with ``change`` applied to each leaf; dicts, lists and tuples keep their type."""
    if isinstance(item, dict):
        changed = {key: rebuilt(value, change) for key, value in item.items()}
        return changed if type(item) is dict else type(item)(changed)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(rebuilt(value, change) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(rebuilt(value, change) for value in item)
    return change(item)
