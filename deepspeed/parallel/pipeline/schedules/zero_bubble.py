"""Orders of a pipeline whose backwards are split into gradients of inputs (B) and of weights (W): what can wait, the W,
fills what would be bubbles.

Qi et al.: Zero bubble pipeline parallelism, ICLR 2024; the V-shaped way: Pipeline parallelism with controllable memory,
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
    Durations,
    Kind,
    Order,
    arrival,
    simulate,
    stage_on_chain,
)


def zero_bubble(
    stages: int, micro_batches: int, *, durations: Durations = EQUAL, held: int | None = None
) -> Order:
    """Backwards split into B and W, one chunk per stage: W fills what would be bubbles.

    ``held``: of how many micro-batches a stage may hold activations; default ``stages``, the most that 1F1B holds.
    With ``2 stages - 1`` no bubble is left between the first B and the last.
    """
    limit = stages if held is None else held
    empty = Order("zero-bubble", micro_batches, ((),) * stages, split=True)
    found = [_greedy(empty, assumed, limit) for assumed in _assumptions(durations, stages * micro_batches)]
    if limit >= stages:
        found.append(_with_lag(stages, micro_batches))
    return min(found, key=lambda order: simulate(order, durations).makespan)


def _with_lag(stages: int, micro_batches: int) -> Order:
    """1F1B whose W follows its B by as many micro-batches as the number of the stage (ZB-H1 of the paper)."""
    actions = []
    for stage in range(stages):
        ahead, lag = min(stages - stage, micro_batches), stage
        own = [Action(Kind.FORWARD, number) for number in range(ahead)]
        for number in range(micro_batches):
            own.append(Action(Kind.BACKWARD, number))
            if number >= lag:
                own.append(Action(Kind.WEIGHTS, number - lag))
            if number + ahead < micro_batches:
                own.append(Action(Kind.FORWARD, number + ahead))
        own += [Action(Kind.WEIGHTS, number) for number in range(max(0, micro_batches - lag), micro_batches)]
        actions.append(tuple(own))
    return Order("zero-bubble", micro_batches, tuple(actions), split=True).check()


def zero_bubble_v(
    stages: int,
    micro_batches: int,
    chunks: int = 2,
    *,
    zigzag: bool = True,
    durations: Durations = EQUAL,
    held: int | None = None,
) -> Order:
    """The same over several chunks per stage, of which every second one is passed in the opposite direction: with two,
    the last chunk is on the first stage, so that its backwards begin at once. The wait for the first micro-batch is
    ``chunks`` times shorter. ``zigzag=False``: round and round. ``held`` counts chunks: ``chunks stages`` is what 1F1B
    holds. ``durations`` are those of a chunk."""
    limit = chunks * stages if held is None else held
    name = "zero-bubble-v" if zigzag else "zero-bubble"
    empty = Order(name, micro_batches, ((),) * stages, chunks, split=True, zigzag=zigzag)
    found = [
        _greedy(empty, assumed, limit)
        for assumed in _assumptions(durations, stages * micro_batches * chunks**2)
    ]
    return min(found, key=lambda order: simulate(order, durations).makespan)


_OTHER_ASSUMPTIONS = (Durations(1.2, 1.2, 0.5), Durations(1.0, 1.0, 0.75))
_LARGE = 4096
"""Of so much work, only the two assumptions that matter most are tried: each takes seconds."""


def _assumptions(durations: Durations, work: int) -> list[Durations]:
    """For which durations to be greedy: being so for the exact ones is not always best in the end. The others are those
    that won most often among many, for 4 stages and what stages of transformers take."""
    others = _OTHER_ASSUMPTIONS if work <= _LARGE else ()
    return list(dict.fromkeys((durations, EQUAL, *others)))


# Greedy schedules --------------------------------------------------------------------------------------------

_ORDERINGS: tuple[Callable[[Action], tuple[int, ...]], ...] = (
    lambda action: (action.micro_batch, -action.chunk),
    lambda action: (-action.chunk, action.micro_batch),
)


def _greedy(empty: Order, durations: Durations, limit: int) -> Order:
    """The best of a few greedy schedules: whenever a stage is free it takes what others wait for most. ``empty``: the
    order without actions; ``limit``: of how many micro-batches x chunks a stage may hold activations."""
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
    """State of a stage in the greedy run: actions done and actions left."""

    left: dict[tuple[Kind, int], int]
    """Of each kind and chunk the next micro-batch: they keep their order."""
    weights: deque[Action] = field(default_factory=deque)
    """The W of the B that are done."""
    done: list[Action] = field(default_factory=list)
    free: float = 0.0
    held: int = 0

    @property
    def busy(self) -> bool:
        return bool(self.left or self.weights)


class _Candidate(NamedTuple):
    """A possible next action of a stage. The smallest is taken first; no two compare equal before the action."""

    start: float
    rank: int  # B goes before F, F before W
    stage: int
    ordering: tuple[int, ...]
    action: Action


class _GreedyRun:
    """Event by event. A W is done where nothing else is ready, or where activations are at their limit.
    ``weights_last``: it begins a moment later than it could, so that whatever else is possible at that time goes first,
    on other stages as well."""

    def __init__(
        self,
        empty: Order,
        durations: Durations,
        limit: int,
        ordering: Callable[[Action], tuple[int, ...]],
        weights_last: bool,
    ) -> None:
        self._empty = empty
        self._durations = durations
        self._limit = limit
        self._ordering = ordering
        self._delay = 1e-9 if weights_last else 0.0
        kinds = [(kind, chunk) for kind in (Kind.FORWARD, Kind.BACKWARD) for chunk in range(empty.chunks)]
        self._stages = [_Stage(dict.fromkeys(kinds, 0)) for _ in range(empty.stages)]
        self._ends: dict[tuple[Kind, int, int], float] = {}

    def order(self) -> Order | None:
        """None: with so few micro-batches held, no stage can go on."""
        coming = [self._next(stage) for stage in range(self._empty.stages)]
        while any(stage.busy for stage in self._stages):
            chosen = min((each for each in coming if each is not None), default=None)
            if chosen is None:
                return None
            for stage in self._do(chosen):
                coming[stage] = self._next(stage)
        return replace(self._empty, actions=tuple(tuple(stage.done) for stage in self._stages))

    def _next(self, number: int) -> _Candidate | None:
        """Return the stage's best next action, with the time it could begin and how many others wait for it."""
        stage = self._stages[number]
        candidates = []
        for (kind, chunk), micro_batch in stage.left.items():
            action = Action(kind, micro_batch, chunk)
            ready = self._ready(action, number)
            if ready is not None:
                start = max(stage.free, ready + self._durations.send if ready else 0.0)
                rank = 0 if kind is Kind.BACKWARD else 1
                candidates.append(_Candidate(start, rank, number, self._ordering(action), action))
        if stage.weights:
            candidates.append(_Candidate(stage.free + self._delay, 2, number, (0,), stage.weights[0]))
        return min(candidates, default=None)

    def _ready(self, action: Action, number: int) -> float | None:
        """When a stage may begin with an F or B, without the time to send what it needs; None: not yet."""
        empty = self._empty
        ready = arrival(action, number, self._ends, empty)
        if action.kind is Kind.BACKWARD:
            forward = Kind.FORWARD, action.micro_batch, empty.chain(action.chunk, number)
            own = self._ends.get(forward)
            return None if ready is None or own is None else max(ready, own)
        full = self._stages[number].held + (empty.chunks - 1 - action.chunk) >= self._limit
        return None if full else ready

    def _do(self, chosen: _Candidate) -> Sequence[int]:
        """Returns the stages whose next action may be another one from now on."""
        stage, action = self._stages[chosen.stage], chosen.action
        stage.free = chosen.start + self._durations.of(action, split=True)
        stage.done.append(action)
        if action.kind is Kind.WEIGHTS:
            stage.weights.popleft()
            stage.held -= 1
            return (chosen.stage,)
        stage.left[action.kind, action.chunk] += 1
        if action.micro_batch + 1 == self._empty.micro_batches:
            del stage.left[action.kind, action.chunk]
        if action.kind is Kind.FORWARD:
            stage.held += 1
        else:
            stage.weights.append(replace(action, kind=Kind.WEIGHTS))
        place = self._empty.chain(action.chunk, chosen.stage)
        self._ends[action.kind, action.micro_batch, place] = stage.free
        after = place + (1 if action.kind is Kind.FORWARD else -1)  # what has waited for this
        if 0 <= after < self._empty.stages * self._empty.chunks:
            return chosen.stage, stage_on_chain(after, self._empty.stages, self._empty.zigzag)
        return (chosen.stage,)
