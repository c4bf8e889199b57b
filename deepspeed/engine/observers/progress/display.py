"""Format of the progress display, chosen by the environment, the config and the caller."""

from __future__ import annotations

import enum
import math
import os
import sys
from dataclasses import dataclass

from deepspeed.base.logging import wants_reports

VARIABLE = "DEEPSPEED_PROGRESS"
"""Environment variable: 0 or off for no progress and no start lines, line, bar, or auto (the default)."""

CLIENTS = {
    "transformers", "accelerate", "trl", "lightning", "lightning_fabric", "pytorch_lightning", "composer",
}  # fmt: skip
"""Packages with their own progress display."""


class LineFormat(enum.Enum):
    NONE = "none"
    LINE = "line"
    BAR = "bar"


_FORM_OF = {"line": LineFormat.LINE, "bar": LineFormat.BAR} | dict.fromkeys(
    ("0", "off", "none", "false", "no"), LineFormat.NONE
)


@dataclass(frozen=True, slots=True)
class Display:
    """A display format. ``every``: optimizer steps between two lines, None for a time interval."""

    form: LineFormat
    every: int | None = None


def asked_form() -> LineFormat | None:
    """Return the format set in the environment, None if unset."""
    return _FORM_OF.get(os.environ.get(VARIABLE, "").strip().lower())


def choose_display(steps_per_print: float | None, log_level: str | None, *, client: bool) -> Display:
    """Choose the display: the environment overrides the config, and the config the default. A number of steps means
    lines, infinity none. Default: none if a client has its own display, else a status line on a terminal, else
    lines."""
    form = asked_form()
    never = steps_per_print is not None and math.isinf(steps_per_print)
    every = None if steps_per_print is None or never else max(1, int(steps_per_print))
    if form is None and (never or not wants_reports(log_level)):
        form = LineFormat.NONE
    if form is None and every is not None:
        form = LineFormat.LINE
    if form is None and client:
        form = LineFormat.NONE
    if form is None:
        from deepspeed.base.terminal import is_terminal  # imported on demand

        form = LineFormat.BAR if is_terminal(sys.stderr) else LineFormat.LINE
    return Display(form, every if form is LineFormat.LINE else None)


def made_by_client() -> bool:
    """Return whether a client library is on the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in CLIENTS:
            return True
        frame = frame.f_back
    return False
