"""Classes that may be inside a checkpoint beyond what ``weights_only=True`` allows by itself: inert data
only, unless the user has told torch to trust all files."""

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
    """Holds, as attributes, what release 0.19 pickled of its loss scaler."""


class DynamicLossScaler(LossScaler):
    """The same for its dynamic loss scaler."""


class FragmentAddress:
    """Holds ``numel`` and ``start`` of a parameter's slice in a flat partition, as release 0.19 pickled
    them."""

    numel: int
    start: int


def zero_stage(value: int) -> int:
    """Stands for the enum of stages that release 0.19 pickled."""
    return value


def _range(*ends: int) -> range:
    """Stands for ``range``: one that a list may be made of."""
    made = range(*ends)
    if len(made) > MAX_RANGE:
        raise ValueError(f"{made}, of more than {MAX_RANGE} numbers")
    return made


MAX_RANGE = 1 << 24
"""A file of a few bytes could have the reader make a list of a range, and so take any memory."""


def _numpy_types() -> list[Any]:
    core: Any = getattr(np, "_core", None) or np.core  # renamed in numpy 2
    scalar_dtypes = {type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"}
    scalar = core.multiarray.scalar

    def reconstruct(kind: type, shape: tuple[int, ...], code: Any) -> Any:
        """Stands for numpy's: an array is empty until its bytes are read, whatever the file says."""
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
    """A path of the other operating system loads as a pure path."""
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
"""Names for which files get something else than the class of that name."""

_REDUCERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    deque: lambda value: (deque, (list(value), value.maxlen)),
    defaultdict: lambda value: (defaultdict, (value.default_factory, dict(value))),
}
"""How to pickle allowed classes whose own pickles torch's reader does not follow."""


def reduced(value: Any) -> Any:
    """For ``reducer_override`` of a pickler: in a form that torch's reader follows, if ``value`` has one of its own."""
    if isinstance(value, enum.Enum):  # some releases of Python pickle them by name
        return type(value), (value.value,)
    return _REDUCERS[type(value)](value) if type(value) in _REDUCERS else NotImplemented


def trusts_files() -> bool:
    """Return whether the user has told torch to load files whole, with all classes and functions that they name."""
    return os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")


def allowed_types() -> AbstractContextManager[None]:
    """While it is active, torch loads these classes too (and those of ``add_safe_globals``), and every enum that has
    been imported: to load one of its members is to look it up."""
    return torch.serialization.safe_globals([*_SAFE, *_enums()])


def _enums() -> list[type[enum.Enum]]:
    """All that have members; one without would make new classes when it is called. There are hundreds, and it is asked
    for each file: no call for each."""
    found: list[type[enum.Enum]] = []
    without: list[type[enum.Enum]] = [enum.Enum]
    while without:
        for cls in without.pop().__subclasses__():
            if not cls._member_map_:
                without.append(cls)
            elif f"{cls.__module__}.{cls.__qualname__}" not in _STOOD_FOR:
                found.append(cls)
    return found
