"""Common part of the monitors: only rank 0 writes, and a failing backend never stops training."""

from __future__ import annotations

import numbers
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from deepspeed.base.logging import is_rank_zero, logger, warning_once
from deepspeed.observe.monitor.utils import run_folder

Event = tuple[str, Any, int]
"""(Name of the curve, value: a number or a one-element tensor, samples processed so far)."""

Point = tuple[str, float, int]

REST_S = 30.0
"""Seconds without writing to a backend after a failure: a full disk may be cleared, but a dead network must not cost
its timeout at every step."""


class Monitor(ABC):
    """Abstract sink of events."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Iterable[Event]) -> None:
        """Add one point to the curve of each event."""


class MonitorBackend(Monitor):
    """A backend, such as TensorBoard. Takes its section of the config, or all of ``monitor_config``.

    Opened on rank 0 when it is created. A failure to open (missing package, no permission, no network) gives a warning,
    and nothing is written; the first later failure gives a warning, and writing is retried after ``REST_S``. Configs
    and artifacts are tried once, each with its own warning.
    """

    key = ""  # name of the section in the config

    def __init__(self, monitor_config: Any) -> None:
        section = getattr(monitor_config, self.key, monitor_config)
        super().__init__(section)
        self.enabled: bool = section.enabled
        self._is_open = False
        self._resting_until_s = 0.0
        self._was_told = False
        if self.enabled and is_rank_zero():
            self._is_open = self._try(self._open)

    @abstractmethod
    def _open(self) -> None:
        """Import the client library and start a run."""

    @abstractmethod
    def _write(self, points: list[Point]) -> None: ...

    def _write_config(self, config: Mapping[str, Any]) -> None:
        """Record the run's config; does nothing in a backend for curves only."""

    def _write_artifact(self, path: str) -> None:
        """Record the file; does nothing in a backend for curves only."""

    def _close(self) -> None:
        """Release what ``_open`` acquired."""

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Record ``config``, nested as in its file and without secrets, with the curves."""
        self._record("the config", lambda: self._write_config(config))

    def write_artifact(self, path: str) -> None:
        """Record the file at ``path``, such as a picture or a table, with the curves."""
        self._record(path, lambda: self._write_artifact(path))

    def write_events(self, event_list: Iterable[Event]) -> None:
        if self._may_write() and (points := numeric(event_list)):
            self._try(lambda: self._write(points))

    def close(self) -> None:
        """Flush buffered events and close the backend; later events are dropped."""
        if self._is_open:
            self._is_open = False
            self._try(self._close)

    def _may_write(self) -> bool:
        return self._is_open and (not self._resting_until_s or time.monotonic() >= self._resting_until_s)

    def _record(self, what: str, act: Callable[[], Any]) -> None:
        """Call ``act``, unless the backend is closed. A failure does not affect the curves."""
        if self._is_open:
            try:
                act()
            except Exception as error:  # anything a client library raises
                why = f"{type(error).__name__}: {error}"
                logger.warning(f"{self.key}: {what} is not recorded in full ({why})")

    def _try(self, act: Callable[[], Any]) -> bool:
        """Call ``act`` and return whether it succeeded."""
        try:
            act()
        except Exception as error:  # client libraries may raise anything; training must not depend on it
            self._resting_until_s = time.monotonic() + REST_S
            if not self._was_told:
                self._was_told = True
                logger.warning(
                    f"{self.key}: curves are not written ({type(error).__name__}: {error}). Training continues without "
                    f"them; set {self.key}.enabled to false to turn it off."
                )
            return False
        self._resting_until_s = 0.0
        return True


class FolderBackend(MonitorBackend):
    """A backend that writes files to ``output_path/job_name``."""

    output_path = property(attrgetter("monitor_config.output_path"))
    job_name = property(attrgetter("monitor_config.job_name"))

    def make_folder(self, base: str | None) -> str:
        """Create the folder of this run and return it. ``base`` (default ``~/KEY``) replaces an empty
        ``output_path``."""
        base = base or os.path.join(os.path.expanduser("~"), self.key)
        folder = run_folder(self.output_path, self.job_name, base)
        os.makedirs(folder, exist_ok=True)
        return folder


def numeric(event_list: Iterable[Event]) -> list[Point]:
    """Convert event values to plain numbers; skip other values, with a warning."""
    points = []
    for event in event_list:
        try:
            name, value, samples = event
            number = value if isinstance(value, numbers.Real) else value.item()
            points.append((str(name), number, int(samples)))
        except (AttributeError, RuntimeError, TypeError, ValueError):
            warning_once(
                f"monitor: an event is (name, number, samples), and {event!r:.80} is skipped; values are numbers or "
                "tensors of one element."
            )
    return points


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten the config to one level, with names such as ``zero_optimization.stage``."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def by_samples(points: Iterable[Point]) -> dict[int, dict[str, float]]:
    """Group the points into one row per number of samples."""
    rows: dict[int, dict[str, float]] = {}
    for name, value, samples in points:
        rows.setdefault(samples, {})[name] = value
    return rows
