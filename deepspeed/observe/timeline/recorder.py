"""Collects named intervals of one rank, and writes them in the JSON format of chrome://tracing.

Times are taken on the host. Events of ``torch.profiler``, which include a device's kernels, can be added on the same
clock. Communication is named after its subject at the time of the call: the bucket, else the module.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from deepspeed.observe.timeline.files import CATEGORY

TRACKS = (
    "steps", "phases", "modules, forward", "modules, backward", "gathers", "collectives", "waits",
    "copies and swaps",
)  # fmt: skip
STEP, PHASE, FORWARD, BACKWARD, GATHER, COLLECTIVE, WAIT, COPY = TRACKS


class TimelineRecorder:
    """The intervals of one rank. Threads may record at the same time."""

    def __init__(self) -> None:
        self._to_wall_clock = time.time_ns() - time.perf_counter_ns()
        self.events: list[dict[str, Any]] = []
        self._thread = threading.local()

    def now(self) -> int:
        """Return the wall-clock time in nanoseconds since the epoch, monotonic."""
        return time.perf_counter_ns() + self._to_wall_clock

    def add(self, track: str, name: str, begin: int, end: int, **metadata: Any) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": CATEGORY,
                "name": name,
                "tid": TRACKS.index(track),
                "ts": begin,
                "dur": max(0, end - begin),
                "args": {"track": track, **metadata},
            }
        )

    @contextmanager
    def span(self, track: str, name: str, **metadata: Any) -> Iterator[None]:
        begin = self.now()
        try:
            yield
        finally:
            self.add(track, name, begin, self.now(), **metadata)

    @contextmanager
    def about(self, name: str) -> Iterator[None]:
        """Attribute this thread's communication inside the block to ``name``."""
        names = self._names()
        names.append(name)
        try:
            yield
        finally:
            names.pop()

    def subject(self) -> str:
        names = self._names()
        return names[-1] if names else ""

    def _names(self) -> list[str]:
        found = getattr(self._thread, "names", None)
        if found is None:
            found = self._thread.names = []
        return found

    def write(self, path: Path, metadata: Mapping[str, Any], operations: Path | None = None) -> None:
        """Write the timeline to a file. ``operations``: torch.profiler's export, whose time base is adopted."""
        others: list[dict[str, Any]] = []
        base = min((event["ts"] for event in self.events), default=self.now())
        if operations is not None:
            exported = json.loads(operations.read_text(encoding="utf-8"))
            base = int(exported.get("baseTimeNanoseconds", 0))
            others = [
                event for event in exported["traceEvents"] if event.get("ph") in ("X", "M", "i", "s", "f")
            ]
        rank = metadata["rank"]
        own = [
            {**event, "pid": rank, "ts": (event["ts"] - base) / 1e3, "dur": event["dur"] / 1e3}
            for event in self.events
        ]
        names = [_named("process_name", rank, 0, f"rank {rank}")]
        names += [_named("thread_name", rank, tid, track) for tid, track in enumerate(TRACKS)]
        trace = {
            "traceEvents": names + own + others,
            "baseTimeNanoseconds": base,
            "displayTimeUnit": "ms",
            CATEGORY: dict(metadata),
        }
        path.write_text(json.dumps(trace), encoding="utf-8")


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


class OperationProfile:
    """torch.profiler for the operations of this process and its device."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def stop(self, path: Path | None) -> None:
        """Stop the profiler. ``path``: file for the events; None: they are dropped."""
        self._profiler.stop()
        if path is not None:
            self._profiler.export_chrome_trace(str(path))


class MethodPatches:
    """Instance methods that are replaced while a timeline is recorded, and restored afterwards. Classes are not
    changed, so that other engines are unaffected."""

    def __init__(self) -> None:
        self._replaced: dict[tuple[int, str], tuple[Any, Any]] = {}

    def method(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        if (id(owner), name) in self._replaced:
            return  # the same object under two names
        self._replaced[id(owner), name] = owner, vars(owner).get(name)  # may be replaced already
        setattr(owner, name, wrap(getattr(owner, name)))

    def undo(self) -> None:
        for (_, name), (owner, before) in self._replaced.items():
            if before is None:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)
        self._replaced.clear()
