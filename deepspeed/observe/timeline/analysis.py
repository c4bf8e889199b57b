"""Analysis of timelines: sums of waiting per step, per bucket or module, and per late rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.observe.timeline.files import RankTrace

Interval = tuple[float, float]
"""Begin and end, in microseconds."""


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank, in milliseconds. ``exposed``: communication that did not overlap with compute: the rank
    waited for it or, with a kernel timeline of a device, no other kernel ran."""

    rank: int
    step: int
    total: float
    forward: float
    backward: float
    update: float
    exposed: float
    copies: float
    data: float


@dataclass(frozen=True)
class Wait:
    """All waits of a rank for one operation on one bucket or module."""

    rank: int
    operation: str
    subject: str
    milliseconds: float
    times: int


@dataclass(frozen=True)
class Lateness:
    """Time that a rank waited for collectives that another rank issued last."""

    waiting: int
    late: int
    subject: str
    milliseconds: float
    times: int


def steps_of(trace: RankTrace) -> list[StepTimes]:
    phases = trace.own("phases")
    waits = _intervals(trace.own("waits", "gathers"))
    kernels = trace.kernels()
    copies = _intervals(trace.own("copies and swaps"))
    if kernels:
        moving = [each for each in kernels if "nccl" in each["name"].lower()]
        computing = _intervals(each for each in kernels if "nccl" not in each["name"].lower())
        waits = subtract(_intervals(moving), computing)
    found = []
    for step in trace.own("steps"):
        span = _interval(step)

        def within(name: str, span: Interval = span) -> float:
            return _length(_clipped(_intervals(each for each in phases if each["name"] == name), span))

        found.append(
            StepTimes(
                trace.rank,
                step["args"]["step"],
                (span[1] - span[0]) / 1e3,
                within("forward"),
                within("backward"),
                within("step"),
                _length(_clipped(waits, span)),
                _length(_clipped(copies, span)),
                within("data and script"),
            )
        )
    return found


def longest_waits(traces: Sequence[RankTrace]) -> list[Wait]:
    """Return all waits, the longest first. Waits within a gather are part of it and not counted again."""
    sums: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for trace in traces:
        gathers = _intervals(trace.own("gathers"))
        for event in trace.own("gathers"):
            sums[trace.rank, "gather", event["args"]["of"]].append(event["dur"])
        for event in trace.own("waits"):
            rest = subtract([_interval(event)], gathers)
            if length := _length(rest):
                sums[trace.rank, event["args"]["operation"], event["args"]["of"]].append(length * 1e3)
        for event in trace.own("copies and swaps"):
            sums[trace.rank, event["name"], event["args"]["of"]].append(event["dur"])
    found = [Wait(*key, sum(times) / 1e3, len(times)) for key, times in sums.items()]
    return sorted(found, key=lambda wait: -wait.milliseconds)


def late_ranks(traces: Sequence[RankTrace]) -> list[Lateness]:
    """Return the waits caused by late ranks, the longest first: the part of a collective's wait before the last rank
    issued it."""
    asked: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    waited: dict[tuple[str, str, int], dict[int, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    subjects: dict[tuple[str, str, int], str] = {}
    sums: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    base = min((trace.base_ns for trace in traces), default=0)
    for trace in traces:
        shift = (trace.base_ns - base) / 1e3
        for event in trace.own("waits"):
            args = event["args"]
            if "from" in args:  # a point-to-point message
                sums[trace.rank, args["from"], args["of"]].append(event["dur"] / 1e3)
                continue
            key = (args["group"], args["operation"], args["number"])
            subjects[key] = args["of"]
            begin, end = _interval(event)
            waited[key][trace.rank].append((begin + shift, end + shift))
            first = asked[key].get(trace.rank)
            asked[key][trace.rank] = min(begin + shift, first) if first is not None else begin + shift
    for key, begins in asked.items():
        if len(begins) < len(key[0].split(",")):
            continue
        late = max(begins, key=lambda rank: begins[rank])
        for rank, intervals in waited[key].items():
            before = _length(_clipped(merged(intervals), (0.0, begins[late])))
            if rank != late and before > 0:
                sums[rank, late, subjects[key]].append(before)
    found = [Lateness(*key, sum(times), len(times)) for key, times in sums.items()]
    return sorted(found, key=lambda each: -each.milliseconds)


# Intervals --------------------------------------------------------------------------------------------------


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals as disjoint intervals, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def subtract(intervals: Iterable[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the union of ``intervals`` without ``others``, which must be `merged`."""
    found: list[Interval] = []
    for begin, end in merged(intervals):
        for low, high in others:
            if high <= begin or low >= end:
                continue
            if low > begin:
                found.append((begin, low))
            begin = max(begin, high)
        if begin < end:
            found.append((begin, end))
    return found


def _interval(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _intervals(events: Iterable[dict[str, Any]]) -> list[Interval]:
    return merged(map(_interval, events))


def _clipped(intervals: Iterable[Interval], span: Interval) -> list[Interval]:
    return [
        (max(begin, span[0]), min(end, span[1]))
        for begin, end in intervals
        if begin < span[1] and end > span[0]
    ]


def _length(intervals: Iterable[Interval]) -> float:
    """Return the total length in milliseconds of intervals in microseconds."""
    return sum(end - begin for begin, end in intervals) / 1e3
