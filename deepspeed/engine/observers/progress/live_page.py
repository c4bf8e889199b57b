"""``monitor.live``: feeds the live record and page of a run from the engine.

A step costs a few clock reads and one queue entry; everything else is done by threads (``observe/live/recorder.py``,
``observe/live/ranks.py``). The numbers of a step are those of ``StepReader``, as for all monitors.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.accelerator.host_memory import resident_bytes
from deepspeed.base.logging import logger
from deepspeed.base.sharded import full_numel
from deepspeed.config.sections.monitor import LiveConfig
from deepspeed.engine.observers.planned_memory import ledger_of, now_and_most
from deepspeed.engine.observers.progress.curve_axis import PREFIXES
from deepspeed.engine.observers.progress.curves import MEMORY, NUMBERS, TIMERS
from deepspeed.engine.observers.progress.readings import StepReader, memory_of, total_steps
from deepspeed.engine.observers.progress.start_report import held_bytes
from deepspeed.observe.live.jobs import JobEntry
from deepspeed.observe.live.ranks import RankStates
from deepspeed.observe.live.record import SPANS, LiveStep
from deepspeed.observe.live.recorder import LiveRecorder, RecordSink
from deepspeed.observe.live.server import TOKEN_FILE, TOKEN_VARIABLE, PageServer, token_for
from deepspeed.planning.ledger import MemoryPlace

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


# Times of the parts of each step, from marks at the engine's events, without waiting for a device. On a device the
# marks are stream events, read a step later, when the device has passed them. So a step reports the parts of the
# previous one; in a mean over a second this is invisible.


ENDS: dict[str, tuple[tuple[str, str], ...]] = {
    "after_forward": (("before_forward", "forward"),),
    "before_reduction": (("before_backward", "inner"),),
    "after_backward": (("before_backward", "backward"), ("before_reduction", "reduction")),
    "after_step": (("before_step", "update"),),
}
"""Event -> parts that end at it, as (event of their begin, name)."""

BEGINS = ("before_forward", "before_backward", "before_reduction", "before_step")
MAX_UNREAD = 1024  # device marks; beyond this, the oldest were passed long ago


class StepParts:
    """Times of forward, backward, its inner part and exposed reduction, and update, summed over a step's
    micro-batches."""

    def __init__(self, engine: Engine) -> None:
        self._on_host = get_accelerator().use_host_timers()
        self._at: dict[str, Any] = {}
        self._ms = dict.fromkeys(SPANS, 0.0)
        self._unread: list[tuple[str, Any, Any]] = []
        self._before: list[tuple[str, Any, Any]] = []
        for event in {*ENDS, *BEGINS}:
            engine.events.on(event, partial(self._reach, event))

    def _reach(self, event: str, **_: Any) -> None:
        if event == "before_forward" and not torch.is_grad_enabled():  # an evaluation, not part of a step
            return
        at, now = self._at, time.perf_counter() if self._on_host else _mark()
        for began, part in ENDS.get(event, ()):
            since = at.get(began)
            if since is None:
                continue
            if self._on_host:
                self._ms[part] += 1e3 * (now - since)
            else:
                self._unread.append((part, since, now))
        if event in BEGINS:
            at[event] = now
        else:
            at.clear()
        if len(self._unread) > MAX_UNREAD:
            self._read(self._unread[: MAX_UNREAD // 2])
            del self._unread[: MAX_UNREAD // 2]

    def _read(self, marks: list[tuple[str, Any, Any]]) -> None:
        """Add up the marks. Those that the device has not passed are dropped rather than waited for."""
        for part, began, ended in marks:
            if ended.query():
                self._ms[part] += began.elapsed_time(ended)

    def take(self) -> tuple[float, ...]:
        """Return milliseconds in the order of ``SPANS``; called at the end of a step."""
        self._read(self._before)
        self._before, self._unread = self._unread, []
        spans = tuple(self._ms.values())
        self._ms = dict.fromkeys(SPANS, 0.0)
        return spans


def _mark() -> Any:
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event


RECORDED_CURVES = frozenset(
    prefix + name
    for prefix in PREFIXES.values()
    for name in (*NUMBERS, MEMORY, *TIMERS.values())
    if NUMBERS.get(name) != "scale"
)
"""Curves that the record already has."""

ARRIVALS = 21

PEAK_TFLOPS = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "GH200": 989, "A100": 312, "A800": 312, "L40S": 362,
    "L4": 121, "A10": 125, "V100": 125, "T4": 65, "MI300X": 1307, "MI250X": 383,
}  # fmt: skip
"""Peak dense 16-bit TFLOPS, as published by the vendors."""


class RankProgress:
    """The state of a rank, made on every rank; written by the training thread, read by another."""

    def __init__(self, engine: Engine) -> None:
        self.step = engine.global_steps
        self._arrivals_s: deque[float] = deque(maxlen=ARRIVALS)
        self.ended_s = self._ready_s = time.perf_counter()
        self._device = engine.device

    def reach_reduction(self, **_: Any) -> None:
        self._ready_s = time.perf_counter()

    def end_step(self, step: int) -> float:
        """End a step; return its duration in seconds."""
        now = time.perf_counter()
        arrival_s, seconds = self._ready_s - self.ended_s, now - self.ended_s
        if arrival_s > 0:  # otherwise no reduction was announced
            self._arrivals_s.append(arrival_s)
        self.step, self.ended_s = step, now
        return seconds

    def arrival_s(self) -> float | None:
        """Return the median seconds from an update until the next gradients are ready; some steps include an
        evaluation."""
        arrivals = sorted(self._arrivals_s)
        return arrivals[len(arrivals) // 2] if arrivals else None

    def snapshot(self) -> dict[str, Any]:
        arrival_s = self.arrival_s()
        arrival_ms = None if arrival_s is None else round(1e3 * arrival_s, 3)
        return {"step": self.step, "arrival_ms": arrival_ms, "memory": memory_of(self._device)}


class LivePage:
    """Live state on every rank; record and page on rank 0, which has a ``reader``."""

    def __init__(self, engine: Engine, config: LiveConfig, reader: StepReader | None) -> None:
        self.engine, self.config, self.reader = engine, config, reader
        self.progress = RankProgress(engine)
        self.ranks = RankStates(self.progress.snapshot)
        self.recorder: LiveRecorder | None = None
        self.server: PageServer | None = None
        self._parts: StepParts | None = None
        engine.monitor.enabled = True  # on every rank: expert observers communicate for their events
        if reader is not None:
            self._begin_recording()
        self.end = weakref.finalize(engine, _end, self.ranks, self.recorder, self.server)
        """Ends threads and server; also called at process exit."""

    def _begin_recording(self) -> None:
        engine, folder = self.engine, Path(self.config.folder)
        info = run_info(engine, self.config.peak_tflops)
        entry = JobEntry({"folder": str(folder.absolute()), "address": None})
        device, ranks, weak_engine = engine.device, self.ranks, weakref.ref(engine)

        def measure() -> dict[str, Any]:
            engine = weak_engine()
            skipped = 0 if engine is None else engine.skipped_steps
            return {"memory": memory_of(device), "skipped": skipped, **ranks.table()}

        self.recorder = LiveRecorder(folder, info, measure, entry=entry)
        self.recorder.history.set_state(run=info)
        engine.monitor.also_to(RecordSink(self.recorder, RECORDED_CURVES))
        if self.config.serve:
            self._serve(self.recorder, folder)
            entry.metadata["address"] = self.server.address if self.server is not None else None

    def _serve(self, recorder: LiveRecorder, folder: Path) -> None:
        try:
            token = token_for(self.config.host, folder)
            self.server = PageServer(recorder.history, self.config.host, self.config.port, token)
        except (OSError, ValueError) as error:
            logger.warning(
                f"cannot serve the live page ({error}); the record is still written, and training continues."
            )

    def line(self) -> str:
        """Return the line for the start of the log."""
        folder = self.config.folder
        if self.server is None:
            return f"live record in {folder}; `ds live {folder}` shows it"
        token = ""
        if self.server.token is not None:
            where = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else Path(folder) / TOKEN_FILE
            token = f" (token in {where})"
        return f"live page at {self.server.address}{token}; record in {folder}"

    # ---- events of the engine

    def listen(self) -> None:
        events = self.engine.events
        if self.recorder is not None:
            self._parts = StepParts(self.engine)
        events.on("before_reduction", self.progress.reach_reduction)
        events.on("after_update", self.after_update)
        events.on("on_destroy", self.close)
        self.ranks.start()
        if self.recorder is not None:
            events.on("on_save", self.after_save)
            events.on("on_load", self.after_load)
            events.on("on_error", self.after_error)
            self.recorder.start()

    def after_update(self, **_: Any) -> None:
        number = self.engine.global_steps
        self.progress.end_step(number)
        reading = self.reader.latest if self.reader is not None else None
        if self.recorder is None or reading is None:
            return
        known = reading.seconds is not None  # a step of unknown duration does not count for the speed
        self.recorder.put_step(
            LiveStep(
                number,
                time.time(),
                reading.seconds,
                reading.samples if known else 0,
                reading.tokens if known or reading.tokens is None else 0,
                reading.loss,
                reading.rate,
                reading.norm,
                self._parts.take() if self._parts is not None else None,
            )
        )

    def after_save(self, *, save_dir: Any, tag: Any, **_: Any) -> None:
        assert self.recorder is not None
        step = self.engine.global_steps
        self.recorder.put_event("saved", step, _where(save_dir, tag or f"global_step{step}"))

    def after_load(self, *, load_dir: Any, tag: Any, **_: Any) -> None:
        """Record a load, after which steps and samples jump."""
        self.progress.step = self.engine.global_steps
        assert self.recorder is not None
        self.recorder.put_event("loaded", self.engine.global_steps, _where(load_dir, tag))

    def after_error(self, *, error: BaseException | None, **_: Any) -> None:
        text = f"{type(error).__name__}: {error}" if error is not None else "backward has failed"
        assert self.recorder is not None
        self.recorder.put_event("error", self.engine.global_steps, text.partition("\n")[0])

    def close(self, **_: Any) -> None:
        self.end()


def _end(ranks: RankStates, recorder: LiveRecorder | None, server: PageServer | None) -> None:
    ranks.end()
    if recorder is not None:
        recorder.end()
    if server is not None:
        server.close()


def run_info(engine: Engine, peak_tflops: float | None) -> dict[str, Any]:
    """Return the constants of this run. ``flops_per_token``: 6 per trained weight, 4 per frozen one (no weight
    gradient), without attention; None unless this rank has the whole model and every token uses every weight."""
    trained = sum(full_numel(p) for p in engine.module.parameters() if p.requires_grad)
    frozen = sum(full_numel(p) for p in engine.module.parameters()) - trained
    whole = engine.mesh.size("tp") == 1 and engine.mesh.size("pp") == 1 and not engine.has_moe_layers
    return {
        "name": Path(sys.argv[0]).name or "python",
        "host": socket.gethostname(),
        "ranks": engine.world_size,
        "device": engine.device.type,
        "stage": engine.plan.zero.stage,
        "precision": engine.plan.precision.name,
        "batch": engine._config.train_batch_size,
        "parameters": trained + frozen,
        "total_steps": total_steps(engine.lr_scheduler),
        "flops_per_token": 6 * trained + 4 * frozen if whole else None,
        "peak_flops": _peak_flops(engine.device, peak_tflops),
        "plan": _plan(engine),
    }


def _peak_flops(device: torch.device, tflops: float | None) -> float | None:
    if tflops is None and device.type != "cpu":
        name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else get_accelerator().device_name()
        )
        tflops = next((value for part, value in PEAK_TFLOPS.items() if part in name), None)
    return None if tflops is None else 1e12 * tflops


def _plan(engine: Engine) -> dict[str, Any]:
    """Return ``now`` and ``most`` as in the start report, and ``line``: the reference for measured memory, on CPUs
    for the whole process, including Python and libraries."""
    try:
        ledger = ledger_of(engine)
        now, most = now_and_most(ledger)
        if engine.device.type == "cpu":
            line = most + max(0, resident_bytes() - held_bytes(engine))
        else:
            line = now_and_most(ledger, (MemoryPlace.DEVICE,))[1]
    except Exception as error:  # a planner error must not stop the run
        logger.debug(f"cannot plan the memory of this run: {error}")
        return {}
    return {"now": now, "most": most, "line": line}


def _where(folder: Any, tag: Any) -> str:
    return str(folder) if tag is None else f"{folder}/{tag}"
