"""A status line of a terminal that is rewritten repeatedly, and detection of other progress displays."""

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
    """Return whether the stream is an interactive terminal that can rewrite a line."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except (OSError, ValueError, AttributeError):  # closed, or an object that only looks like a stream
        return False


def another_display_is_active() -> bool:
    """Return whether the script shows its own progress: a tqdm or rich bar is on the screen."""
    if open_bars():
        return True
    console = getattr(sys.modules.get("rich"), "_console", None)
    return bool(getattr(console, "_live", None) or getattr(console, "_live_stack", None))


class StatusLine:
    """The last line of the terminal behind standard error; after a failed write it is disabled."""

    def __init__(self) -> None:
        self._works = True
        self._shown = False
        atexit.register(self.close)
        logger.addFilter(self.make_room)

    def show(self, text: str) -> None:
        """Replace the line by ``text``, truncated to the terminal's width."""
        if self._works:
            width = shutil.get_terminal_size().columns - 1
            self._works = write_safely(f"\r{text[:width]}{ERASE_TO_END}", sys.stderr)
            self._shown = self._works

    def make_room(self, record: logging.LogRecord) -> bool:
        """Erase the line before a log record is printed (a logger filter); the next ``show`` draws it below."""
        if self._shown and self._works:
            self._works = write_safely(f"\r{ERASE_TO_END}", sys.stderr)
            self._shown = False
        return True

    def close(self) -> None:
        """Leave the line on the screen and move to the next one."""
        atexit.unregister(self.close)
        logger.removeFilter(self.make_room)
        if self._shown and self._works:
            write_safely("\n", sys.stderr)
        self._shown = self._works = False
