"""Orders with backwards split into input gradients (B) and weight gradients (W): deferred W fill the bubbles.

Qi et al.: Zero bubble pipeline parallelism, ICLR 2024; the V shape: Pipeline parallelism with controllable memory,
NeurIPS 2024.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from deepspeed.parallel.pipeline.schedules.orders import (
    EQUAL,
    Action,
    ActionKind,
    Durations,
    Order,
    by_turns,
    ready_time,
    simulate,
    stage_of_position,
)


def zero_bubble(
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    zigzag: bool = False,
    durations: Durations = EQUAL,
    held: int | None = None,
) -> Order:
    """Return the best zero-bubble order.

    With several chunks per stage, warm-up is ``chunks`` times shorter. ``zigzag``: every second one is traversed in the
    opposite direction: with two, the last chunk is on the first stage, so that its backwards start at once; otherwise
    round-robin. ``durations`` are per chunk.

    ``held``: micro-batches x chunks whose activations a stage may hold; default ``chunks stages``, the maximum of 1F1B.
    With one chunk and ``2 stages - 1`` no bubble is left between the first B and the last.
    """
    limit = chunks * stages if held is None else held
    name = "zero-bubble-v" if zigzag else "zero-bubble"
    empty = Order(name, micro_batches, ((),) * stages, chunks, split=True, zigzag=zigzag)
    assumptions = _assumptions(durations, stages * micro_batches * chunks**2)
    found = [_greedy(empty, assumed, limit) for assumed in assumptions]
    if chunks == 1 and limit >= stages:
        found.append(by_turns(empty, lambda stage: stages - stage))  # the paper's ZB-H1
    return min(found, key=lambda order: simulate(order, durations).makespan)


_OTHER_ASSUMPTIONS = (Durations(1.2, 1.2, 0.5), Durations(1.0, 1.0, 0.75))
_LARGE = 4096
"""Above this much work, only the two most useful assumptions are tried: each takes seconds."""


def _assumptions(durations: Durations, work: int) -> list[Durations]:
    """Return the durations to run the greedy algorithm with: the exact ones do not always give the best order. The
    others won most often in a search, for 4 stages and durations typical of transformers."""
    others = _OTHER_ASSUMPTIONS if work <= _LARGE else ()
    return list(dict.fromkeys((durations, EQUAL, *others)))


# Greedy schedules --------------------------------------------------------------------------------------------

_ORDERINGS: tuple[Callable[[Action], tuple[int, ...]], ...] = (
    lambda action: (action.micro_batch, -action.chunk),
    lambda action: (-action.chunk, action.micro_batch),
)


def _greedy(empty: Order, durations: Durations, limit: int) -> Order:
    """Return the best of a few greedy orders, in which an idle stage takes the action that others need most. ``empty``:
    the order without actions; ``limit``: micro-batches x chunks whose activations a stage may hold."""
    found = [
        _GreedyRun(empty, durations, limit, ordering, weights_last).order()
        for ordering in _ORDERINGS[: 1 if empty.chunks == 1 else None]
        for weights_last in (False, True)
    ]
    orders = [order for order in found if order is not None]
    if not orders:
        raise ValueError(f"{empty.name}: {limit} micro-batches are too few for {empty.stages} stages")
    return min(orders, key=lambda order: simulate(order, durations).makespan).check()


@dataclass(slots=True)
class _Stage:
    """State of a stage in the greedy run."""

    left: dict[tuple[ActionKind, int], int]
    """Next micro-batch of each kind and chunk: micro-batches stay in order."""
    weights: deque[Action] = field(default_factory=deque)
    """Pending W, whose B are done."""
    done: list[Action] = field(default_factory=list)
    free: float = 0.0
    held: int = 0

    @property
    def busy(self) -> bool:
        return bool(self.left or self.weights)


class _Candidate(NamedTuple):
    """A possible next action of a stage. The smallest is taken first; ties are broken before ``action`` is compared."""

    start: float
    rank: int  # B goes before F, F before W
    stage: int
    ordering: tuple[int, ...]
    action: Action


@dataclass
class _GreedyRun:
    """Event-driven greedy scheduler. A W runs when nothing else is ready, or activations are at their limit.
    ``weights_last``: delay each W infinitesimally, so that anything else possible at that time goes first, also on
    other stages."""

    empty: Order
    durations: Durations
    limit: int
    ordering: Callable[[Action], tuple[int, ...]]
    weights_last: bool

    def __post_init__(self) -> None:
        kinds = [
            (kind, chunk)
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for chunk in range(self.empty.chunks)
        ]
        self._stages = [_Stage(dict.fromkeys(kinds, 0)) for _ in range(self.empty.stages)]
        self._ends: dict[tuple[ActionKind, int, int], float] = {}

    def order(self) -> Order | None:
        """Return the order; None if the limit on held micro-batches blocks all stages."""
        candidates = [self._next(stage) for stage in range(self.empty.stages)]
        while any(stage.busy for stage in self._stages):
            chosen = min((each for each in candidates if each is not None), default=None)
            if chosen is None:
                return None
            for stage in self._apply(chosen):
                candidates[stage] = self._next(stage)
        return replace(self.empty, actions=tuple(tuple(stage.done) for stage in self._stages))

    def _next(self, number: int) -> _Candidate | None:
        """Return the stage's best next action with its earliest start time and rank."""
        stage = self._stages[number]
        candidates = []
        for (kind, chunk), micro_batch in stage.left.items():
            action = Action(kind, micro_batch, chunk)
            ready = self._earliest_start(action, number)
            if ready is not None:
                start = max(stage.free, ready + self.durations.send if ready else 0.0)
                rank = 0 if kind is ActionKind.BACKWARD else 1
                candidates.append(_Candidate(start, rank, number, self.ordering(action), action))
        if stage.weights:
            candidates.append(
                _Candidate(stage.free + 1e-9 * self.weights_last, 2, number, (0,), stage.weights[0])
            )
        return min(candidates, default=None)

    def _earliest_start(self, action: Action, number: int) -> float | None:
        """Return the earliest time at which an F or B may start, excluding transfer of its inputs; None: not yet."""
        empty = self.empty
        ready = ready_time(action, number, self._ends, empty)
        if action.kind is ActionKind.BACKWARD:
            forward = ActionKind.FORWARD, action.micro_batch, empty.position(action.chunk, number)
            own = self._ends.get(forward)
            return None if ready is None or own is None else max(ready, own)
        full = self._stages[number].held + (empty.chunks - 1 - action.chunk) >= self.limit
        return None if full else ready

    def _apply(self, chosen: _Candidate) -> Sequence[int]:
        """Apply the chosen action and return the stages whose next action may have changed."""
        stage, action = self._stages[chosen.stage], chosen.action
        stage.free = chosen.start + self.durations.of(action, split=True)
        stage.done.append(action)
        if action.kind is ActionKind.WEIGHTS:
            stage.weights.popleft()
            stage.held -= 1
            return (chosen.stage,)
        stage.left[action.kind, action.chunk] += 1
        if action.micro_batch + 1 == self.empty.micro_batches:
            del stage.left[action.kind, action.chunk]
        if action.kind is ActionKind.FORWARD:
            stage.held += 1
        else:
            stage.weights.append(replace(action, kind=ActionKind.WEIGHTS))
        place = self.empty.position(action.chunk, chosen.stage)
        self._ends[action.kind, action.micro_batch, place] = stage.free
        after = place + (1 if action.kind is ActionKind.FORWARD else -1)  # the chunk that depends on this one
        if 0 <= after < self.empty.stages * self.empty.chunks:
            return chosen.stage, stage_of_position(after, self.empty.stages, self.empty.zigzag)
        return (chosen.stage,)
