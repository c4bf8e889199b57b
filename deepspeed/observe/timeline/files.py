"""Reads the timelines of ranks, and joins them into one for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.base.exceptions import ExplainedError

CATEGORY = "deepspeed"
"""Category of this package's events; torch.profiler uses others."""


class UnreadableTrace(ExplainedError, ValueError):
    """A file or folder holds no timeline of this package."""


@dataclass(frozen=True)
class RankTrace:
    rank: int
    metadata: dict[str, Any]
    base_ns: int
    """Origin of the events' times, in nanoseconds since the epoch; the times themselves are in microseconds."""
    events: list[dict[str, Any]]

    def own(self, *tracks: str) -> list[dict[str, Any]]:
        """Return this package's events on these tracks."""
        return [
            each for each in self.events if each.get("cat") == CATEGORY and each["args"]["track"] in tracks
        ]

    def kernels(self) -> list[dict[str, Any]]:
        return [each for each in self.events if each.get("cat") == "kernel" and each.get("ph") == "X"]


def read_traces(path: Path) -> list[RankTrace]:
    """Read the timelines of a folder, of one rank's file, or of a joined file, sorted by rank. Raises
    UnreadableTrace."""
    if not path.exists():
        raise UnreadableTrace(f"{path} does not exist: pass the trace.path folder of a run")
    files = sorted(path.glob("rank*.trace.json")) if path.is_dir() else [path]
    if not files:
        raise UnreadableTrace(f"{path} holds no rank*.trace.json: pass the trace.path folder of a run")
    found = [trace for file in files for trace in _of_file(file)]
    ranks = found[0].metadata["ranks"]
    if path.is_dir() and len(found) < ranks:
        missing = sorted(set(range(ranks)) - {trace.rank for trace in found})
        raise UnreadableTrace(f"{path} lacks the timeline of rank {', '.join(map(str, missing))} of {ranks}")
    return sorted((trace for trace in found if trace.rank < ranks), key=lambda trace: trace.rank)


def _of_file(path: Path) -> Iterator[RankTrace]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        metadata, events, base = content[CATEGORY], content["traceEvents"], content["baseTimeNanoseconds"]
        joined: list[dict[str, Any]] | None = metadata.get("joined")
        alone = None if joined is not None else (metadata["rank"], metadata["ranks"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise UnreadableTrace(f"{path} is not a timeline written by the config key trace") from None
    if alone is not None:
        yield RankTrace(alone[0], metadata, base, events)
    for rank, own in enumerate(joined or ()):
        places = range(rank * PLACES, (rank + 1) * PLACES)
        yield RankTrace(rank, own, base, [event for event in events if event.get("pid") in places])


PLACES = 1000
"""Process ids reserved per rank in a joined file: chrome://tracing needs integers."""


def join(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Join the timelines of all ranks into one. Clocks of different hosts are not aligned."""
    base = min(trace.base_ns for trace in traces)
    events = [event for trace in traces for event in _moved(trace, base)]
    return {
        "traceEvents": events,
        "baseTimeNanoseconds": base,
        "displayTimeUnit": "ms",
        CATEGORY: {"joined": [trace.metadata for trace in traces]},
    }


def _moved(trace: RankTrace, base: int) -> Iterator[dict[str, Any]]:
    shift = (trace.base_ns - base) / 1e3
    numbers: dict[Any, int] = {trace.rank: 0}
    for event in trace.events:
        pid = numbers.setdefault(event.get("pid"), len(numbers))
        moved = {**event, "pid": trace.rank * PLACES + min(pid, PLACES - 1)}
        if "ts" in event:
            moved["ts"] = event["ts"] + shift
        if event.get("ph") == "M" and event.get("name") == "process_name" and pid:
            moved["args"] = {"name": f"rank {trace.rank}: {event['args'].get('name', 'operations')}"}
        if event.get("ph") in ("s", "f"):
            moved["id"] = f"{trace.rank}.{event.get('id')}"  # keeps flow arrows within a rank
        yield moved
