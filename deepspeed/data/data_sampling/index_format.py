"""Common part of the two kinds of indexed files: names, codes of dtypes, documents."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

CODES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.uint16,
    7: np.uint32,
    8: np.uint64,
}
MEGATRON_CODES: dict[int, Any] = {6: np.float64, 7: np.float32, 8: np.uint16}
"""Codes that Megatron-LM gives another meaning than release 0.19."""


def code(dtype: Any) -> int:
    """The code of a dtype in the header of an index. ValueError: files do not hold this dtype."""
    wanted = np.dtype(dtype)
    for number, known in CODES.items():
        if np.dtype(known) == wanted:
            return number
    known = ", ".join(np.dtype(each).name for each in CODES.values())
    raise ValueError(f"indexed files hold {known}, not {wanted.name}")


def index_file_path(prefix_path: str | Path) -> str:
    return f"{prefix_path}.idx"


def data_file_path(prefix_path: str | Path) -> str:
    return f"{prefix_path}.bin"


def read_longs(f: IO[bytes], n: int) -> np.ndarray:
    """``n`` numbers of 64 bits."""
    return np.frombuffer(f.read(8 * n), dtype=np.int64).copy()


def write_longs(f: IO[bytes], a: Iterable[int]) -> None:
    f.write(np.asarray(list(a), dtype=np.int64).tobytes())
