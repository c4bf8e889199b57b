"""Orders of the actions of pipeline stages: pure data, constructed, simulated and drawn without processes.

An *order* is a tuple of actions per stage. Communication follows from it: a forward waits for the outputs of the
previous chunk, a backward for the gradients of the next one, and both send their results immediately. A *chunk* is a
run of layers that a stage holds; most orders have one per stage. Chunk ``c`` of stage ``s`` is the ``chain(c, s)``-th
that a micro-batch passes through.

1F1B: Narayanan et al., SOSP 2019; interleaved: Narayanan et al., SC 2021. Orders with split backwards are in
``zero_bubble.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from deepspeed.base.exceptions import ExplainedError


class ActionKind(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    """Input gradients; weight gradients too if no WEIGHTS action follows."""
    WEIGHTS = "W"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    kind: ActionKind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}" + ("'" * self.chunk)


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of one chunk's actions, in any unit. An unsplit backward takes ``backward + weights``."""

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0
    send: float = 0.0

    def of(self, action: Action, *, split: bool) -> float:
        if action.kind is ActionKind.FORWARD:
            return self.forward
        if action.kind is ActionKind.WEIGHTS:
            return self.weights
        return self.backward if split else self.backward + self.weights


EQUAL = Durations()
"""The assumption behind the papers' formulas."""

TYPICAL = Durations(forward=1.0, backward=1.25, weights=0.8)
"""Assumption before anything is measured. Only matrix products with weights have a part of backward that can be
deferred; attention, norms and losses do all of it at once. An order that exactly fits equal durations (F B F B W W on
the last of two stages) stalls its neighbours once B takes longer than W; one made for these durations does not."""


@dataclass(frozen=True, slots=True)
class Order:
    """All actions of a batch; ``actions[s]``: of stage ``s``. ``split``: backwards defer weight gradients to later
    actions. ``zigzag``: chunks go back and forth (V) instead of round-robin."""

    name: str
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    chunks: int = 1
    split: bool = False
    zigzag: bool = False

    @property
    def stages(self) -> int:
        return len(self.actions)

    def position(self, chunk: int, stage: int) -> int:
        """Return the position of a chunk in a micro-batch's forward order."""
        return chunk_position(chunk, stage, self.stages, self.zigzag)

    def check(self) -> Order:
        """Return self. ValueError: on some stage an action is missing, duplicated, or before one it depends on."""
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD, *((ActionKind.WEIGHTS,) if self.split else ()))
        for stage, actions in enumerate(self.actions):
            place = {action: number for number, action in enumerate(actions)}
            if len(place) != len(actions):
                raise ValueError(f"{self.name}: stage {stage} repeats an action")
            for micro_batch in range(self.micro_batches):
                for chunk in range(self.chunks):
                    own = [place.get(Action(kind, micro_batch, chunk), -1) for kind in kinds]
                    if -1 in own or own != sorted(own):
                        raise ValueError(
                            f"{self.name}: stage {stage} lacks or misplaces a part of micro-batch {micro_batch}"
                        )
            if len(place) != self.micro_batches * self.chunks * len(kinds):
                raise ValueError(f"{self.name}: stage {stage} has more actions than exist")
        return self

    def held(self, stage: int) -> int:
        """Return the maximum number of micro-batches x chunks whose activations the stage holds at a time. With split
        backwards, activations are held until WEIGHTS."""
        last = ActionKind.WEIGHTS if self.split else ActionKind.BACKWARD
        now = most = 0
        for action in self.actions[stage]:
            now += (action.kind is ActionKind.FORWARD) - (action.kind is last)
            most = max(most, now)
        return most


def chunk_position(chunk: int, stage: int, stages: int, zigzag: bool) -> int:
    """Return the position of a stage's chunk in a micro-batch's forward order."""
    back = zigzag and chunk % 2
    return chunk * stages + (stages - 1 - stage if back else stage)


def stage_of_position(number: int, stages: int, zigzag: bool) -> int:
    """Return the stage that holds the chunk at a position in forward order; inverse of ``chunk_position``."""
    chunk, place = divmod(number, stages)
    return stages - 1 - place if zigzag and chunk % 2 else place


@dataclass(frozen=True, slots=True)
class Simulation:
    """Simulated timeline of an order; ``times[s]``: start and end of each action of stage ``s``."""

    order: Order
    times: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def makespan(self) -> float:
        return max(stage[-1][1] for stage in self.times)

    @property
    def bubble(self) -> float:
        """Fraction of the makespan in which a stage is idle, averaged over stages. Time after a stage's last action
        counts, as the optimizer step waits for all stages."""
        busy = [sum(end - start for start, end in stage) for stage in self.times]
        return 1 - sum(busy) / (len(busy) * self.makespan)

    def chart(self, width: float = 1.0) -> str:
        """Draw the timeline as text: one line per stage, one column per ``width`` of time."""
        lines = []
        for stage, (actions, times) in enumerate(zip(self.order.actions, self.times, strict=True)):
            cells = ["."] * round(self.makespan / width)
            for action, (start, end) in zip(actions, times, strict=True):
                for cell in range(round(start / width), round(end / width)):
                    cells[cell] = str(action)
            lines.append(f"stage {stage}: " + " ".join(f"{cell:>4}" for cell in cells))
        return "\n".join(lines)


class DeadlockError(ExplainedError, ValueError):
    """Stages of an order wait for each other in a cycle."""


def ready_time(
    action: Action, stage: int, ends: dict[tuple[ActionKind, int, int], float], order: Order
) -> float | None:
    """Return the time at which the other chunks have produced an action's inputs, excluding transfer; None: not yet."""
    number = order.position(action.chunk, stage)
    if action.kind is ActionKind.FORWARD:
        return 0.0 if number == 0 else ends.get((ActionKind.FORWARD, action.micro_batch, number - 1))
    if action.kind is ActionKind.BACKWARD and number < order.stages * order.chunks - 1:
        return ends.get((ActionKind.BACKWARD, action.micro_batch, number + 1))
    return 0.0


def simulate(order: Order, durations: Durations | Sequence[Durations] = EQUAL) -> Simulation:
    """Simulate an order, with the same ``durations`` for all stages or one each. DeadlockError: stages deadlock.

    A send overlaps computation and arrives ``send`` after the end of its action.
    """
    each = [durations] * order.stages if isinstance(durations, Durations) else list(durations)
    ends: dict[tuple[ActionKind, int, int], float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in order.actions]
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(order.actions):
            while len(times[stage]) < len(actions):
                action = actions[len(times[stage])]
                ready = ready_time(action, stage, ends, order)
                if ready is None:
                    break
                free = times[stage][-1][1] if times[stage] else 0.0
                start = max(free, ready + each[stage].send if ready else 0.0)
                end = start + each[stage].of(action, split=order.split)
                times[stage].append((start, end))
                ends[action.kind, action.micro_batch, order.position(action.chunk, stage)] = end
                moved = True
    stuck = [
        f"stage {stage} at {actions[len(times[stage])]}"
        for stage, actions in enumerate(order.actions)
        if len(times[stage]) < len(actions)
    ]
    if stuck:
        raise DeadlockError(f"{order.name}: {', '.join(stuck)} wait for each other")
    return Simulation(order, tuple(map(tuple, times)))


# Orders ------------------------------------------------------------------------------------------------------


def one_forward_one_backward(stages: int, micro_batches: int) -> Order:
    """Return 1F1B: stage ``s`` holds at most ``stages - s`` micro-batches; bubble ``(p - 1) / (m + p - 1)``."""
    return by_turns(Order("1f1b", micro_batches, ((),) * stages), lambda stage: stages - stage)


def by_turns(
    empty: Order,
    ahead: Callable[[int], int],
    action: Callable[[ActionKind, int], Action] = Action,
) -> Order:
    """Return the order in which stage ``s`` begins with ``ahead(s)`` forwards; then backwards and the other forwards
    take turns. If it is split, W lags behind B by as many as the index of the stage. ``empty``: the order without
    actions; ``action(kind, n)``: the n-th of its kind."""
    total = empty.micro_batches * empty.chunks
    actions = []
    for stage in range(empty.stages):
        forwards = [action(ActionKind.FORWARD, number) for number in range(total)]
        weights = [action(ActionKind.WEIGHTS, number) for number in range(total if empty.split else 0)]
        first = min(ahead(stage), total)
        own = forwards[:first]
        for number in range(total):
            own.append(action(ActionKind.BACKWARD, number))
            if number >= stage:
                own += weights[number - stage : number - stage + 1]
            own += forwards[first + number : first + number + 1]
        actions.append((*own, *weights[max(0, total - stage) :]))
    return replace(empty, actions=tuple(actions)).check()


def forward_only(stages: int, micro_batches: int, chunks: int = 1, *, zigzag: bool = False) -> Order:
    """Return the order of an evaluation: each chunk processes ``stages`` micro-batches before the next chunk starts."""
    own = [
        Action(ActionKind.FORWARD, number, chunk)
        for start in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for number in range(start, min(start + stages, micro_batches))
    ]
    return Order("inference", micro_batches, (tuple(own),) * stages, chunks=chunks, zigzag=zigzag)


def interleaved(stages: int, micro_batches: int, chunks: int) -> Order:
    """Return interleaved 1F1B: each stage holds ``chunks`` runs of layers, and the bubble is ``chunks`` times smaller.
    ValueError: ``stages`` does not divide ``micro_batches``."""
    if micro_batches % stages:
        raise ValueError(
            f"interleaved 1F1B needs a multiple of {stages} (stages) micro-batches, not {micro_batches}"
        )

    def action(kind: ActionKind, number: int) -> Action:
        """Return the ``number``-th action of its kind: ``stages`` micro-batches through each chunk in turn."""
        turn, within = divmod(number, stages * chunks)
        chunk, offset = divmod(within, stages)
        return Action(
            kind, turn * stages + offset, chunk if kind is ActionKind.FORWARD else chunks - 1 - chunk
        )

    empty = Order("interleaved", micro_batches, ((),) * stages, chunks=chunks)
    return by_turns(empty, lambda stage: 2 * (stages - stage - 1) + (chunks - 1) * stages + 1, action)
