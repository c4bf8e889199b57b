"""Progress bars of the script, beside which log lines are written: a bar ends without a newline until it is closed."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO


def open_bars() -> list[Any]:
    """Return the tqdm bars that are drawn now."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    instances = list(getattr(tqdm, "_instances", None) or ())
    return [bar for bar in instances if not getattr(bar, "disable", False)]


class LineBreaks:
    """Tells whether a log line has to begin with a newline, because a bar stands on the line it would be written to."""

    def __init__(self) -> None:
        self._after_ours: Any = None

    def needed(self, stream: TextIO) -> bool:
        """True if a bar shares the file of ``stream`` and was drawn since ``written`` was called last."""
        bars = [bar for bar in open_bars() if _same_file(getattr(bar, "fp", None), stream)]
        return bool(bars) and _state(stream, bars) != self._after_ours

    def written(self, stream: TextIO) -> None:
        """Remember that the last line of ``stream`` is a complete one."""
        bars = open_bars()
        self._after_ours = _state(stream, bars) if bars else None


def _state(stream: TextIO, bars: list[Any]) -> Any:
    """Return what changes when a bar is drawn: the position in a file, or of a pipe and a terminal the time of it."""
    try:
        return os.lseek(stream.fileno(), 0, os.SEEK_CUR)
    except (OSError, ValueError, AttributeError):
        return [(id(bar), getattr(bar, "last_print_t", None)) for bar in bars]


def _same_file(bar: Any, stream: TextIO) -> bool:
    try:
        return os.path.samestat(os.fstat(bar.fileno()), os.fstat(stream.fileno()))
    except (OSError, ValueError, AttributeError):  # no files: objects that only look like one
        return False
