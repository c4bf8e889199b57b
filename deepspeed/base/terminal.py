"""One line of a terminal that is rewritten repeatedly, and whether something else is doing that."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
from typing import TextIO

from deepspeed.base.logging import logger, open_bars, write_safely

ERASE_TO_END = "\x1b[K"


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether a person sees this stream, on a terminal that can move back within a line."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except (OSError, ValueError, AttributeError):  # closed, or an object that only looks like a stream
        return False


def another_display_is_active() -> bool:
    """Tell whether a tqdm or rich progress bar is on the screen now: then the script shows its own progress."""
    if open_bars():
        return True
    console = getattr(sys.modules.get("rich"), "_console", None)
    return bool(getattr(console, "_live", None) or getattr(console, "_live_stack", None))


class StatusLine:
    """The last line of the terminal behind standard error; if it cannot be written to, it is never tried again."""

    def __init__(self) -> None:
        self._works = True
        self._shown = False
        atexit.register(self.close)
        logger.addFilter(self.make_room)

    def show(self, text: str) -> None:
        """Replace what is shown; truncated to the width of the terminal, so that it stays one line."""
        if self._works:
            width = shutil.get_terminal_size().columns - 1
            self._works = write_safely(f"\r{text[:width]}{ERASE_TO_END}", sys.stderr)
            self._shown = self._works

    def make_room(self, record: logging.LogRecord) -> bool:
        """A logger filter: a log line replaces what is shown, until it is shown again below."""
        if self._shown and self._works:
            self._works = write_safely(f"\r{ERASE_TO_END}", sys.stderr)
            self._shown = False
        return True

    def close(self) -> None:
        """Leave what is shown on the screen and move to the next line."""
        atexit.unregister(self.close)
        logger.removeFilter(self.make_room)
        if self._shown and self._works:
            write_safely("\n", sys.stderr)
        self._shown = self._works = False
