"""Classes that may be inside a checkpoint beyond what ``weights_only=True`` allows by itself: inert data
only."""

from __future__ import annotations

import argparse
import datetime
import decimal
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


def _numpy_types() -> list[Any]:
    core: Any = getattr(np, "_core", None) or np.core  # renamed in numpy 2
    scalar_dtypes = {type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"}
    reconstruct, scalar = core.multiarray._reconstruct, core.multiarray.scalar
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
    range,
    bytearray,
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (zero_stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


REDUCERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    deque: lambda value: (deque, (list(value), value.maxlen)),
    defaultdict: lambda value: (defaultdict, (value.default_factory, dict(value))),
}
"""How to pickle allowed classes whose own pickles torch's reader does not follow."""


def allowed_types() -> AbstractContextManager[None]:
    """While it is active, torch loads these classes too (and those of ``add_safe_globals``)."""
    return torch.serialization.safe_globals(_SAFE)
