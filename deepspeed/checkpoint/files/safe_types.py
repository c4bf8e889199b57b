"""Classes allowed in a checkpoint beyond those of ``weights_only=True``: inert data only, unless the user told torch
to trust all files."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import os
import pathlib
import types
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch


class LossScaler:
    """Stand-in for release 0.19's pickled loss scaler; holds its attributes."""


class DynamicLossScaler(LossScaler):
    """Stand-in for release 0.19's dynamic loss scaler."""


class FragmentAddress:
    """Stand-in for release 0.19's ``numel`` and ``start`` of a parameter's slice of a flat partition."""

    numel: int
    start: int


def zero_stage(value: int) -> int:
    """Stand in for release 0.19's pickled enum of stages."""
    return value


def _range(*ends: int) -> range:
    """Stand in for ``range``, limited to MAX_RANGE numbers."""
    made = range(*ends)
    if len(made) > MAX_RANGE:
        raise ValueError(f"{made}, of more than {MAX_RANGE} numbers")
    return made


MAX_RANGE = 1 << 24
"""Limit of a range: a tiny file could otherwise expand one into a list of any size."""


def _numpy_types() -> list[Any]:
    core: Any = getattr(np, "_core", None) or np.core  # renamed in numpy 2
    scalar_dtypes = {type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"}
    scalar = core.multiarray.scalar

    def reconstruct(kind: type, shape: tuple[int, ...], code: Any) -> Any:
        """Stand in for numpy's function, but refuse to allocate: valid pickles start from an empty array."""
        if shape != (0,):
            raise ValueError(f"an array of shape {shape!r:.50} without content")
        return core.multiarray._reconstruct(kind, shape, code)

    # Files written under numpy 1 and 2 name these by different paths.
    paths = ("numpy.core.multiarray", "numpy._core.multiarray")
    return [
        np.ndarray,
        np.dtype,
        *scalar_dtypes,
        *((reconstruct, f"{path}._reconstruct") for path in paths),
        *((scalar, f"{path}.scalar") for path in paths),
    ]


def _path_types() -> list[Any]:
    """Return the path classes; a path of the other operating system loads as a pure path."""
    own = type(pathlib.Path())
    by_name = {
        "PurePosixPath": pathlib.PurePosixPath,
        "PureWindowsPath": pathlib.PureWindowsPath,
        "PosixPath": own if issubclass(own, pathlib.PurePosixPath) else pathlib.PurePosixPath,
        "WindowsPath": own if issubclass(own, pathlib.PureWindowsPath) else pathlib.PureWindowsPath,
    }
    # Python 3.13 pickles them under another module.
    return [
        (cls, f"{module}.{name}") for name, cls in by_name.items() for module in ("pathlib", "pathlib._local")
    ]


_SAFE: list[Any] = [
    *_numpy_types(),
    *_path_types(),
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    decimal.Decimal,
    uuid.UUID,
    argparse.Namespace,
    types.SimpleNamespace,
    defaultdict,
    deque,
    *(bool, int, float, str, bytes, list, tuple, dict, set),  # factories of a defaultdict
    frozenset,
    complex,
    slice,
    (_range, "builtins.range"),
    bytearray,
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (zero_stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


_STOOD_FOR = {entry[1] for entry in _SAFE if isinstance(entry, tuple)}
"""Qualified names that load as one of our stand-ins."""

_REDUCERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    deque: lambda value: (deque, (list(value), value.maxlen)),
    defaultdict: lambda value: (defaultdict, (value.default_factory, dict(value))),
}
"""Reducers for allowed classes whose default pickles torch's unpickler cannot read."""


def reduced(value: Any) -> Any:
    """Return the ``reducer_override`` of ``value`` in a form that torch's unpickler reads, or NotImplemented."""
    if isinstance(value, enum.Enum):  # some Python releases pickle them by name
        return type(value), (value.value,)
    return _REDUCERS[type(value)](value) if type(value) in _REDUCERS else NotImplemented


def trusts_files() -> bool:
    """Return whether the user told torch to unpickle any class or function that a file names."""
    return os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")


def allowed_types() -> AbstractContextManager[None]:
    """Return a context in which torch also loads these classes and every imported enum (loading a member is a
    lookup), besides those of ``add_safe_globals``."""
    return torch.serialization.safe_globals([*_SAFE, *_enums()])


def _enums() -> list[type[enum.Enum]]:
    """Return all enums that have members; calling one without would make a new class. There are hundreds, and this
    runs per file, so the loop makes no call per enum."""
    found: list[type[enum.Enum]] = []
    without: list[type[enum.Enum]] = [enum.Enum]
    while without:
        for cls in without.pop().__subclasses__():
            if not cls._member_map_:
                without.append(cls)
            elif f"{cls.__module__}.{cls.__qualname__}" not in _STOOD_FOR:
                found.append(cls)
    return found
