"""Annotations as they are written, which Python's releases keep in different places."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any


def get_annotations_from_namespace(namespace: Mapping[str, object]) -> dict[str, Any]:
    """Annotations of a class from the namespace that a metaclass is given, before the class exists."""
    kept = namespace.get("__annotations__")
    if isinstance(kept, Mapping):
        return dict(kept)
    if sys.version_info >= (3, 14):  # the namespace has a function that makes them
        import annotationlib  # pyright: ignore[reportMissingImports]

        make = annotationlib.get_annotate_from_class_namespace(namespace)
        if make is not None:
            return annotationlib.call_annotate_function(make, format=annotationlib.Format.FORWARDREF)
    return {}


def get_annotations(obj: Any) -> dict[str, Any]:
    """Annotations of a class (its own, not those of its bases), a function or a module."""
    return dict(inspect.get_annotations(obj))
