"""Kernels for host and GPU, the optimizers built on them, number formats, attention, and asynchronous file I/O.

`native.py` loads the host library that `csrc/` builds; `gpu/` has the Triton kernels, each next to a plain reference;
`formats/` has every low-bit number format. Uses `base`; submodules are imported on first use. Start reading:
`native.py`, `multi_tensor.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

_SUBMODULES = ("adagrad", "adam", "aio", "gds", "lamb", "lion", "native", "op_builder", "sgd")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__compatible_ops__":  # documented: builder NAME -> whether it can be used here
        builders = importlib.import_module(f"{__name__}.op_builder")
        classes = [getattr(builders, attribute) for attribute in builders.__all__]
        value = {cls.NAME: cls().is_compatible() for cls in classes if hasattr(cls, "NAME")}
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
