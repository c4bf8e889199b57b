"""Transforms of a module before it is sharded, and of the inputs of its forward (``docs/transforms.md``)."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "checkpoint.originals": ("Expression", "Joined", "LowRank", "Part", "Transposed", "Weight"),
    "transforms.errors": ("TransformError",),
    "transforms.inputs": ("ForwardFacts", "InputChain", "InputTransform"),
    "transforms.module_transforms": ("ModuleTransform", "TransformContext", "request", "transform_module"),
    "transforms.record": ("TransformReport", "Transforms", "transforms_of"),
}
"""Names by defining module, imported lazily: most runs transform nothing."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"deepspeed.{_MODULE_OF[name]}"), name)
    return value
