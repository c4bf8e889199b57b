"""Discrete-event simulation: tasks with dependencies that queue for resources. Independent of training.

A task is ready once its dependencies have ended and its latency has passed. A resource serves ready tasks first come,
first served (ties in the given order), one at a time, without preemption.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed.base.exceptions import ExplainedError


@dataclass(frozen=True, slots=True)
class Task:
    """A task. ``work``: seconds on a worker, bytes on a link. ``after``: indices of its dependencies. ``wait``: latency
    in seconds from their end until the task is ready, in which it occupies no resource."""

    name: str
    resource: str
    work: float
    after: tuple[int, ...] = ()
    wait: float = 0.0


class Link:
    """A link of ``rate`` bytes per second, with a token bucket: unused rate is saved, up to ``burst`` bytes, which may
    then pass at ``peak`` bytes per second."""

    def __init__(self, rate: float, burst: float = 0.0, peak: float | None = None) -> None:
        if not rate > 0 or burst < 0:
            raise ValueError(
                f"a link of {rate} bytes per second with a burst of {burst}: rate must be above 0"
            )
        self.rate, self.burst = rate, burst
        self.peak = max(rate, rate if peak is None else peak)
        self._saved, self._at = burst, 0.0

    def serve(self, start: float, work: float) -> float:
        """Return the end, in seconds, of a task that begins at ``start``. Called in order of time."""
        saved = min(self.burst, self._saved + self.rate * (start - self._at))
        end = start + max(work / self.peak, (work - saved) / self.rate)
        self._saved = max(0.0, saved + self.rate * (end - start) - work)
        self._at = end
        return end

    def begin_again(self, now: float) -> None:
        """Reset the clock to 0 at ``now``, keeping the saved burst."""
        self._saved, self._at = min(self.burst, self._saved + self.rate * (now - self._at)), 0.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Start and end of every task, in seconds."""

    tasks: Sequence[Task]
    starts: Sequence[float]
    ends: Sequence[float]

    @property
    def makespan(self) -> float:
        return max(self.ends, default=0.0)

    def busy(self, resource: str) -> float:
        """Return the seconds in which the resource serves a task."""
        rows = zip(self.tasks, self.starts, self.ends, strict=True)
        return sum(end - start for task, start, end in rows if task.resource == resource)

    def critical_path(self) -> list[int]:
        """Return the indices of the tasks on the critical path, first to last: each delays the next, as its dependency
        or by occupying its resource."""
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


class CircularTasks(ExplainedError, ValueError):
    """The dependencies of tasks form a cycle."""


def simulate(tasks: Sequence[Task], links: Mapping[str, Link]) -> Schedule:
    """Simulate all tasks; a resource that is not one of ``links`` is a worker, whose work is given in seconds.
    CircularTasks: some tasks never start."""
    waits_for = [len(set(task.after)) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for needed in set(task.after):
            followers[needed].append(number)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    queues: dict[str, list[tuple[float, int]]] = {task.resource: [] for task in tasks}
    free = dict.fromkeys(queues, True)
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
                work = tasks[number].work
                ends[number] = links[name].serve(now, work) if name in links else now + work
                heapq.heappush(events, (ends[number], number, True))
    if done < len(tasks):
        stuck = [tasks[i].name for i in range(len(tasks)) if waits_for[i]]
        raise CircularTasks(f"these wait for each other: {', '.join(stuck[:5])}")
    return Schedule(tuple(tasks), tuple(starts), tuple(ends))
