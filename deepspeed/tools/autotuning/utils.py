"""Helpers of the autotuner: nested config values, experiment files, log search, number formats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def search_error(filename: str) -> str | None:
    """Return the last line of a log that reports an error; None if no line does. Reports a missing log as such."""
    path = Path(filename)
    if not path.exists():
        return f"{path.name} does not exist"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.strip() for line in lines if re.search(r"\b\w*(Error|Exception)\b|\berror: ", line)]
    return errors[-1] if errors else None


def get_val_by_key(d: Any, k: str) -> Any:
    """Return the value of a key anywhere in nested dicts, outermost first; None if it is missing."""
    if not isinstance(d, Mapping):
        return None
    if k in d:
        return d[k]
    inner = (get_val_by_key(value, k) for value in d.values())
    return next((value for value in inner if value is not None), None)


def set_val_by_key(d: dict[str, Any], k: str, vv: Any) -> None:
    """Set the value of a key wherever it occurs in nested dicts; below an occurrence, nothing is searched."""
    for key, value in d.items():
        if key == k:
            d[key] = vv
        elif isinstance(value, dict):
            set_val_by_key(value, k, vv)


_BINARY = (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10), ("", 1))
_DECIMAL = (("B", 10**9), ("M", 10**6), ("K", 10**3), ("", 1))


def memory_to_string(n: float, postfix: str = "", units: str | None = None, precision: int = 2) -> str:
    """Format bytes in binary units: ``memory_to_string(1 << 30, "B")`` is ``"1.0 GB"``."""
    return _with_unit(n, postfix, units, precision, _BINARY)


def number_to_string(n: float, postfix: str = "", units: str | None = None, precision: int = 2) -> str:
    """Format a number in decimal units: ``number_to_string(1234567)`` is ``"1.23 M"``; ``B`` is 10**9."""
    return _with_unit(n, postfix, units, precision, _DECIMAL)


def _with_unit(
    n: float, postfix: str, units: str | None, precision: int, table: Sequence[tuple[str, int]]
) -> str:
    sizes = dict(table)
    if units is not None and units not in sizes:
        raise ValueError(f"units={units!r}: one of {', '.join(map(repr, sizes))}")
    unit = units if units is not None else next((name for name, size in table if abs(n) >= size), "")
    value = n if not unit else round(n / sizes[unit], precision)
    return f"{value} {unit}{postfix}"
