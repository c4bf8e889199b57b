"""Operations with kernels of their own; submodules are imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

_SUBMODULES = ("adagrad", "adam", "lamb", "lion", "native", "op_builder", "sgd")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__compatible_ops__":  # documented: builder NAME -> whether it can be used here
        builders = importlib.import_module(f"{__name__}.op_builder")
        value = {
            builder.NAME: builder().is_compatible()
            for builder in map(builders.__dict__.get, getattr(builders, "__all__", ()))
            if hasattr(builder, "NAME")
        }
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
