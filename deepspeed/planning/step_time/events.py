"""Discrete events: tasks that wait for each other and queue for resources. Pure; knows nothing of training.

A task is ready when everything it comes after has ended. A resource serves those that are ready in the order in which
they became so (those of the same moment in the order in which they were given), one at a time, each to its end.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deepspeed.base.exceptions import ExplainedError


@dataclass(frozen=True, slots=True)
class Task:
    """``work``: seconds on a worker, bytes on a link. ``after``: numbers of the tasks that have to end before.
    ``wait``: seconds from then on until it is ready, in which it occupies nothing (a latency)."""

    name: str
    resource: str
    work: float
    after: tuple[int, ...] = ()
    wait: float = 0.0


class Resource(Protocol):
    def serve(self, start: float, work: float) -> float:
        """When a task ends that starts now. Called in the order of time."""
        ...


class Worker:
    """A thread, a processor, a stream: work is time."""

    def serve(self, start: float, work: float) -> float:
        return start + work


class Link:
    """Bytes at a ``rate`` per second. ``burst``: bytes that may pass at ``peak`` after a rest, as a token bucket has
    them: what is not used while the link rests is saved, up to that many."""

    def __init__(self, rate: float, burst: float = 0.0, peak: float | None = None) -> None:
        if not rate > 0 or burst < 0:
            raise ValueError(f"a link of {rate} bytes per second with a burst of {burst}: a rate is above 0")
        self.rate, self.burst = rate, burst
        self.peak = max(rate, rate if peak is None else peak)
        self._saved, self._at = burst, 0.0

    def serve(self, start: float, work: float) -> float:
        saved = min(self.burst, self._saved + self.rate * (start - self._at))
        end = start + max(work / self.peak, (work - saved) / self.rate)
        self._saved = max(0.0, saved + self.rate * (end - start) - work)
        self._at = end
        return end

    def begin_again(self, now: float) -> None:
        """Call this moment 0, with what has been saved until then."""
        self._saved, self._at = min(self.burst, self._saved + self.rate * (now - self._at)), 0.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """When every task started and ended."""

    tasks: Sequence[Task]
    starts: Sequence[float]
    ends: Sequence[float]

    @property
    def makespan(self) -> float:
        return max(self.ends, default=0.0)

    def busy(self, resource: str) -> float:
        """Seconds in which it served somebody."""
        rows = zip(self.tasks, self.starts, self.ends, strict=True)
        return sum(end - start for task, start, end in rows if task.resource == resource)

    def critical_path(self) -> list[int]:
        """Numbers of the tasks without whose time the last one would have ended earlier, first to last: each was
        waited for by the next, as what it needs or as what the resource served before."""
        if not self.tasks:
            return []
        before = self._served_before()
        number = max(range(len(self.tasks)), key=lambda i: self.ends[i])
        path = [number]
        while True:
            task = self.tasks[number]
            needed = [i for i in (*task.after, before[number]) if i is not None]
            if not needed:
                return path[::-1]
            number = max(needed, key=lambda i: self.ends[i] + (task.wait if i in task.after else 0.0))
            path.append(number)

    def _served_before(self) -> list[int | None]:
        before: list[int | None] = [None] * len(self.tasks)
        last: dict[str, int] = {}
        for number in sorted(range(len(self.tasks)), key=lambda i: (self.starts[i], self.ends[i], i)):
            resource = self.tasks[number].resource
            before[number] = last.get(resource)
            last[resource] = number
        return before

    def chart(self, columns: int = 72) -> str:
        """One line per resource: '#' while it serves somebody."""
        names = list(dict.fromkeys(task.resource for task in self.tasks))
        width = max(map(len, names), default=0)
        scale = columns / self.makespan if self.makespan else 0.0
        lines = []
        for name in names:
            cells = ["."] * columns
            for task, start, end in zip(self.tasks, self.starts, self.ends, strict=True):
                if task.resource == name and end > start:
                    low, high = int(start * scale), max(int(start * scale) + 1, round(end * scale))
                    cells[low:high] = "#" * (min(high, columns) - low)
            lines.append(f"{name:<{width}} {''.join(cells[:columns])}")
        return "\n".join(lines)


class CircularTasks(ExplainedError, ValueError):
    """Tasks wait for each other in a circle."""


def simulate(tasks: Sequence[Task], resources: Mapping[str, Resource]) -> Schedule:
    """Serve all tasks; those of a resource that is not given are work in seconds. CircularTasks: some never start."""
    served = {name: resources.get(name) or Worker() for name in {task.resource for task in tasks}}
    waits_for = [len(set(task.after)) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for needed in set(task.after):
            followers[needed].append(number)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    queues: dict[str, list[tuple[float, int]]] = {name: [] for name in served}
    free = dict.fromkeys(served, True)
    events = [(tasks[i].wait, i, False) for i, count in enumerate(waits_for) if not count]
    heapq.heapify(events)
    done = 0
    while events:
        now = events[0][0]
        touched: dict[str, None] = {}
        while events and events[0][0] == now:
            _, number, ended = heapq.heappop(events)
            task = tasks[number]
            touched[task.resource] = None
            if not ended:
                heapq.heappush(queues[task.resource], (now, number))
                continue
            done += 1
            free[task.resource] = True
            for follower in followers[number]:
                waits_for[follower] -= 1
                if not waits_for[follower]:
                    heapq.heappush(events, (now + tasks[follower].wait, follower, False))
        for name in touched:
            if free[name] and queues[name]:
                _, number = heapq.heappop(queues[name])
                free[name] = False
                starts[number] = now
                ends[number] = served[name].serve(now, tasks[number].work)
                heapq.heappush(events, (ends[number], number, True))
    if done < len(tasks):
        stuck = [tasks[i].name for i in range(len(tasks)) if waits_for[i]]
        raise CircularTasks(f"these wait for each other: {', '.join(stuck[:5])}")
    return Schedule(tuple(tasks), tuple(starts), tuple(ends))
