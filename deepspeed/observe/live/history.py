"""Recent history of a run for the live page, in bounded memory, with queries for the entries since a visitor's last
request.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from deepspeed.observe.live import record

MAX_ROWS = 4096
MAX_EVENTS = 500
MAX_VALUES = 30_000
"""Limit on the values of additional curves, over all of them."""

SPEED_ROWS, SPEED_S = 20, 10.0


class MetricHistory:
    """Rows, events and curves in order of their steps, each with an increasing number.

    If there are too many rows, neighbours are merged, and visitors receive everything again (``epoch``). Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self.epoch = 0
        self._rows: list[tuple[int, record.Row]] = []
        self._events: list[tuple[int, record.Item]] = []
        self._curves: list[tuple[int, record.Item]] = []
        self._values = 0
        self._state: dict[str, Any] = {}

    # ---- input

    def extend(self, entries: Iterable[record.Row | record.Item]) -> None:
        """Add entries of a record, in its order."""
        with self._lock:
            for entry in entries:
                if isinstance(entry, list):
                    self._rows.append((self._next(), entry))
                elif "resume" in entry:
                    self._resume(entry)
                elif "curves" in entry:
                    self._curves.append((self._next(), entry))
                    self._values += len(entry["curves"])
                elif "run" in entry:
                    self._state["run"] = entry["run"]
                elif "ranks" in entry:
                    self._state["ranks"] = entry["ranks"]
                elif "event" in entry:
                    self._add_event(entry)
            self._thin_out()

    def set_state(self, **state: Any) -> None:
        """Set current values; replaces earlier ones of the same name."""
        with self._lock:
            self._state |= state

    def clear(self) -> None:
        with self._lock:
            self._rows, self._events = [], []
            self._state.pop("saved", None)
            self._keep_curves([])
            self.epoch += 1

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _resume(self, entry: record.Item) -> None:
        """Drop everything after the step from which the run resumes: those steps are repeated."""
        step = entry["resume"]
        self._rows = [(number, _until(row, step)) for number, row in self._rows if row[record.FIRST] <= step]
        self._keep_curves([each for each in self._curves if each[1]["step"] <= step])
        ranks = self._state.get("run", {}).get("ranks")
        on = f" on {ranks} rank{'' if ranks == 1 else 's'}" if ranks else ""
        text = f"resumed at step {step}{on}"
        self._add_event({"event": "resume", "t": entry["t"], "step": step, "text": text})
        self.epoch += 1

    def _add_event(self, event: record.Item) -> None:
        if event["event"] == "saved":
            self._state["saved"] = {"step": event["step"], "text": event["text"]}
        self._events.append((self._next(), event))
        del self._events[:-MAX_EVENTS]

    def _thin_out(self) -> None:
        while len(self._rows) > MAX_ROWS:
            old, pairs = self._rows, len(self._rows) // 2
            halved = [
                (old[2 * i + 1][0], record.merged(old[2 * i][1], old[2 * i + 1][1])) for i in range(pairs)
            ]
            self._rows = halved + old[2 * pairs :]
            self.epoch += 1
        while len(self._curves) > 1 and self._values > MAX_VALUES:
            self._keep_curves(self._curves[1::2])
            self.epoch += 1

    def _keep_curves(self, curves: list[tuple[int, record.Item]]) -> None:
        self._curves = curves
        self._values = sum(len(each["curves"]) for _, each in curves)

    # ---- queries

    @property
    def last_step(self) -> int | None:
        with self._lock:
            return self._rows[-1][1][record.LAST] if self._rows else None

    @property
    def state(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._state)

    def newest(self, count: int) -> list[record.Row]:
        with self._lock:
            return [row for _, row in self._rows[-count:]]

    def seconds(self) -> float:
        """Return the total seconds of all steps."""
        with self._lock:
            return sum(row[record.SECONDS] or 0.0 for _, row in self._rows)

    def answer(self, epoch: int, since: int) -> dict[str, Any]:
        """Return the entries since ``(epoch, number)`` of an earlier answer, or everything if that epoch is over."""
        with self._lock:
            if epoch != self.epoch or not 0 <= since <= self._number:
                since = -1
            return {
                "epoch": self.epoch,
                "number": self._number,
                "all": since < 0,
                "columns": record.COLUMNS,
                "rows": _behind(self._rows, since),
                "events": _behind(self._events, since),
                "curves": _behind(self._curves, since),
                "state": dict(self._state),
            }


def _behind(numbered: list[tuple[int, Any]], since: int) -> list[Any]:
    """Return the entries numbered above ``since``. Searches from the end, so the cost grows with the new entries
    only."""
    found = []
    for number, entry in reversed(numbered):
        if number <= since:
            break
        found.append(entry)
    return found[::-1]


def _until(row: record.Row, step: int) -> record.Row:
    return row if row[record.LAST] <= step else [*row[: record.LAST], step, *row[record.LAST + 1 :]]


def summarize_rows(rows: list[record.Row], run: dict[str, Any]) -> dict[str, Any]:
    """Summarize the newest rows. Speeds are over the last ``SPEED_S`` seconds, or over the last row if it took longer;
    ``mfu`` is model FLOPS utilization."""
    recent: list[record.Row] = []
    seconds = 0.0
    for row in reversed(rows):
        if seconds >= SPEED_S:
            break
        recent.append(row)
        seconds += row[record.SECONDS] or 0.0
    if not recent:
        return {}
    newest = recent[0]
    standing = {
        "step": newest[record.LAST],
        "loss": newest[record.LOSS],
        "lr": newest[record.LR],
        "norm": newest[record.NORM],
        "memory": newest[record.MEMORY],
        "plan": run.get("plan") or {},
        "spans": {
            name: newest[record.SPAN + i]
            for i, name in enumerate(record.SPANS)
            if newest[record.SPAN + i] is not None
        },
    }
    if not seconds:
        return standing
    tokens = [row[record.TOKENS] for row in recent if row[record.TOKENS] is not None]
    tokens_per_s = sum(tokens) / seconds if tokens else None
    of_peak = None
    if tokens_per_s and run.get("flops_per_token") and run.get("peak_flops"):
        of_peak = tokens_per_s * run["flops_per_token"] / (run["peak_flops"] * run["ranks"])
    return standing | {
        "step_s": record.short(
            seconds / sum(row[record.LAST] - row[record.FIRST] + 1 for row in recent if row[record.SECONDS])
        ),
        "samples_s": record.short(sum(row[record.SAMPLES] for row in recent) / seconds),
        "tokens_s": record.short(tokens_per_s),
        "mfu": record.short(of_peak),
    }
