"""Writes the record of a run, in a background thread.

The training thread only appends to a queue (``put_step``, ``put_event``, ``put_curves``). The background thread drains
it once a second and does all slow work: disk writes, the job's entry for `ds top`, the other ranks' numbers. Its
failures are logged once and never reach training.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed.base.logging import logger
from deepspeed.comm.pending import explanation
from deepspeed.observe.live import record
from deepspeed.observe.live.history import SPEED_ROWS, MetricHistory, summarize_rows
from deepspeed.observe.live.jobs import JobEntry
from deepspeed.observe.monitor.base import Event, Monitor, numeric

PAUSE_S = 1.0
MAX_QUEUE = 100_000  # pending entries while the disk does not respond; older ones are dropped
JOIN_S = 3.0
PATIENCE_S = 10.0  # wait for the previous process to close the record
REST_S = 30.0  # pause in writing after a failure
CURVE_BYTES_PER_S = 200.0
RANKS_BYTES_PER_S = 20.0
MAX_CURVES = 2000
SHOWN_LOSSES = 60
ENTRY_S = 2.0
"""Refresh interval of `ds top`."""
_NOT_OF_STEPS = ("now", "step", "hang", "memory", "ended")
"""Keys of the state that are valid before the first step."""


class LiveRecorder:
    """Records a run; one per engine, on rank 0.

    Args:
        folder: of the record.
        run: description of this process, recorded at its start, as plain values.
        measure: called by the thread; returns the current state (memory, ranks, ...), which is shown unchanged.
        now: the clock, in seconds since the epoch.
    """

    def __init__(
        self,
        folder: Path,
        run: dict[str, Any],
        measure: Callable[[], dict[str, Any]] = dict,
        *,
        entry: JobEntry | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.history = MetricHistory()
        self._queue: deque[tuple[str, Any]] = deque(maxlen=MAX_QUEUE)
        self._run, self._measure, self._entry, self._now = run, measure, entry, now
        self._file = record.RecordFile(folder)
        self._window = record.StepWindow()
        self._new: list[record.Row | record.Item] = []
        self._memory: int | None = None
        self._begun = False
        self._unknown_loss = False
        self._hang = ""
        self._curves: dict[str, float] = {}
        self._curves_due_s = self._ranks_due_s = self._entry_due_s = 0.0
        self._resting_until_s = 0.0
        self._opened_s: float | None = None
        self._in_memory_only = self._was_told = False
        self._step = 0
        self._pid = os.getpid()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="deepspeed live record", daemon=True)

    # ---- called by the training thread

    def put_step(self, step: record.LiveStep) -> None:
        self._queue.append(("step", step))

    def put_event(self, kind: str, step: int, text: str) -> None:
        self._queue.append(
            ("event", {"event": kind, "t": round(self._now(), 1), "step": step, "text": text[:2000]})
        )

    def put_curves(self, values: dict[str, Any]) -> None:
        """Queue values: numbers, or one-element tensors that are no longer modified, since the thread reads them
        later."""
        self._queue.append(("curves", values))

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Write the remaining entries and stop the thread. Does nothing in a forked child."""
        if self._pid != os.getpid() or self._end.is_set():
            return
        self._end.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    # ---- background thread

    def _run_thread(self) -> None:
        while not self._end.wait(PAUSE_S):
            self.look()
        self.look(last=True)

    def look(self, *, last: bool = False) -> None:
        """Drain the queue, write the entries that are due, and update the page."""
        try:
            now = self._now()
            if not self._file.is_open and not self._in_memory_only and not self._open(now) and not last:
                return
            state = self._measure()
            self._memory = state.get("memory", self._memory)
            self._fold()
            if self._window.is_due(now) or (last and self._window.first is not None):
                self._take_window()
            self._look_for_hangs(now)
            self._add_sampled(now, state, last)
            standing = summarize_rows(self.history.newest(SPEED_ROWS), self._run)
            here = {"hang": self._hang, "now": now, "ended": last, "step": self._step}
            self.history.set_state(**{**standing, **state, **here})
            if last and self._begun:
                self._add({"event": "end", "t": round(now, 1), "step": self._step, "text": "exited"})
            self._write(now)
            if self._entry is not None and not last and now >= self._entry_due_s:
                self._entry.write(self._summary())
                self._entry_due_s = now + ENTRY_S - PAUSE_S / 2
        except Exception as error:  # no failure here may affect training
            self._notify(f"live page and record failed ({type(error).__name__}: {error})")
        if last:
            self._file.close()
            if self._entry is not None:
                self._entry.remove()

    def _open(self, now: float) -> bool:
        """Open the record; return False to retry while another process holds it. If it cannot be opened, the run is
        kept in memory only."""
        self._opened_s = now if self._opened_s is None else self._opened_s
        try:
            self.history.extend(self._file.open())
        except record.RecordInUse as error:
            if now - self._opened_s < PATIENCE_S:
                return False
            self._in_memory_only = True
            self._notify(
                f"{error}: give each job its own monitor.live.folder. The page keeps this run in memory only"
            )
        except OSError as error:
            self._in_memory_only = True
            self._notify(
                f"monitor.live.folder: cannot write the record ({error}). The page keeps this run in memory only"
            )
        self._window.active_s = self.history.seconds()
        return True

    def _fold(self) -> None:
        while self._queue:
            kind, value = self._queue.popleft()
            if kind == "step":
                self._take_step(value)
                if value.time - self._window.began >= self._window.width_s:
                    self._take_window()
            elif kind == "event":
                self._take_window()
                self._add(value)
            else:
                self._take_curves(value)

    def _take_step(self, step: record.LiveStep) -> None:
        before = self._window.last if self._window.first is not None else self.history.last_step
        if not self._begun:
            self._begin(step, before)
        elif before is not None and step.number != before + 1:
            self._take_window()
            self._add({"resume": step.number - 1, "t": round(step.time, 1)})
        self._window.add(step)
        self._step = step.number
        unknown = step.loss is not None and not record.is_known(step.loss)
        if unknown and not self._unknown_loss:
            text = f"the loss is {step.loss}"
            self._add({"event": "loss", "t": round(step.time, 1), "step": step.number, "text": text})
        self._unknown_loss = unknown

    def _begin(self, step: record.LiveStep, before: int | None) -> None:
        """Handle the first step of this process: continue the record, or start a new one."""
        self._begun = True
        if before is not None and step.number == 1:  # a new run in the folder of an earlier one
            if self._file.is_open:
                self._file.set_aside()
            self.history.clear()
            self._window.active_s = 0.0
            before = None
        time_ = round(step.time, 1)
        self._add({"run": self._run, "t": time_})
        if before is not None:
            self._add({"resume": step.number - 1, "t": time_})
        else:
            self._add({"event": "start", "t": time_, "step": step.number - 1, "text": "run started"})

    def _take_window(self) -> None:
        if self._window.first is not None:
            self._add(self._window.take_row(self._memory))

    def _take_curves(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name in self._curves or len(self._curves) < MAX_CURVES:
                self._curves[name] = float(value)

    def _look_for_hangs(self, now: float) -> None:
        text = explanation.text
        if text != self._hang:
            self._take_window()
            event = (
                {"event": "hang", "text": text[:2000]}
                if text
                else {"event": "on", "text": "training continues"}
            )
            self._add({**event, "t": round(now, 1), "step": self._step})
        self._hang = text

    def _add_sampled(self, now: float, state: dict[str, Any], last: bool) -> None:
        """Add additional curves and the state of the ranks, at intervals that bound their bytes per second."""
        if self._curves and self._begun and (last or now >= self._curves_due_s):
            curves = {name: record.short(value) for name, value in self._curves.items()}
            self._add({"curves": curves, "t": round(now, 1), "step": self._step})
            self._curves = {}
            size = sum(len(name) + 12 for name in curves)
            self._curves_due_s = now + max(self._window.width_s, size / CURVE_BYTES_PER_S)
        if state.get("ranks") and self._begun and (last or now >= self._ranks_due_s):
            self._add({"ranks": state["ranks"]})
            self._ranks_due_s = now + max(30.0, 90 * len(state["ranks"]) / RANKS_BYTES_PER_S)

    def _add(self, entry: record.Row | record.Item) -> None:
        self._new.append(entry)
        self.history.extend([entry])

    def _write(self, now: float) -> None:
        new, self._new = self._new, []
        if not self._file.is_open or now < self._resting_until_s:
            return
        try:
            self._file.write(new)
        except OSError as error:
            self._resting_until_s = now + REST_S
            self._notify(f"monitor.live.folder: cannot write the record ({error}); retrying")

    def _notify(self, text: str) -> None:
        if not self._was_told:
            self._was_told = True
            logger.warning(f"{text}; training continues.")

    # ---- current state

    def _summary(self) -> dict[str, Any]:
        """Return the entry for `ds top`. Before the first step, the history still describes an earlier run."""
        if not self._begun:
            state = {name: value for name, value in self.history.state.items() if name in _NOT_OF_STEPS}
            return {**state, "run": self._run, "losses": []}
        losses = [row[record.LOSS] for row in self.history.newest(SHOWN_LOSSES)]
        return {**self.history.state, "losses": losses}


class RecordSink(Monitor):
    """Records events that are written to the engine's monitor, except those in ``own``, which the record already has.

    Device tensors are not synchronized: a copy is enqueued on the device's stream.
    """

    def __init__(self, recorder: LiveRecorder, own: frozenset[str]) -> None:
        super().__init__(None)
        self._recorder, self._own = recorder, own

    def write_events(self, event_list: Iterable[Event]) -> None:
        here, there = [], {}
        for event in event_list:
            if event[0] in self._own:
                continue
            if isinstance(event[1], Tensor) and event[1].device.type != "cpu":
                there[str(event[0])] = event[1].detach().clone()
            else:
                here.append(event)
        values = there | {name: value for name, value, _ in numeric(here)}
        if values:
            self._recorder.put_curves(values)
