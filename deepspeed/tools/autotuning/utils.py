"""Helpers of the autotuner: nested config values, log search."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
