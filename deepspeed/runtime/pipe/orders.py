"""In which order each stage of a pipeline computes: pure data, made, simulated and drawn without processes.

An *order* is a tuple of actions per stage. What is communicated follows from it: a forward waits for the outputs of the
chunk before, a backward for the gradients of the chunk after, and both send what they make at once. A *chunk* is a run
of layers that a stage holds; most orders have one per stage. Chunk ``c`` of stage ``s`` is number ``chain(c, s)`` on
the way of a micro-batch through the model.

1F1B: Narayanan et al., SOSP 2019; interleaved: Narayanan et al., SC 2021; backward split into gradients of inputs (B)
and of weights (W), and the V-shaped way: Qi et al.: Zero bubble pipeline parallelism, ICLR 2024, and Pipeline
parallelism with controllable memory, NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of inputs; of weights as well where no action of kind WEIGHTS follows."""
    WEIGHTS = "W"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}" + ("'" * self.chunk)


@dataclass(frozen=True, slots=True)
class Durations:
    """Times of one chunk, in any unit. A backward that is not split takes ``backward + weights``."""

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0
    send: float = 0.0

    def of(self, action: Action, *, split: bool) -> float:
        if action.kind is Kind.FORWARD:
            return self.forward
        if action.kind is Kind.WEIGHTS:
            return self.weights
        return self.backward if split else self.backward + self.weights


TYPICAL = Durations(forward=1.0, backward=1.25, weights=0.8)
"""What to plan for before anything is measured. Only products with weights have a part that can be put off; attention,
norms and losses do all of their backward at once. An order that fits equal durations exactly (F B F B W W on the last
of two stages) makes its neighbours wait as soon as B takes longer than W; one that fits these loses nothing there."""


@dataclass(frozen=True, slots=True)
class Order:
    """``actions[s]``: what stage ``s`` does. ``split``: backwards leave the gradients of weights to later actions.
    ``zigzag``: chunks go forth and back (V) instead of round and round."""

    name: str
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    chunks: int = 1
    split: bool = False
    zigzag: bool = False

    @property
    def stages(self) -> int:
        return len(self.actions)

    def chain(self, chunk: int, stage: int) -> int:
        """Number of a chunk on the way of a micro-batch."""
        return place_on_chain(chunk, stage, self.stages, self.zigzag)

    def check(self) -> Order:
        """ValueError: an action is missing, or twice, or out of order for one stage alone."""
        kinds = (Kind.FORWARD, Kind.BACKWARD, *((Kind.WEIGHTS,) if self.split else ()))
        for stage, actions in enumerate(self.actions):
            place = {action: number for number, action in enumerate(actions)}
            if len(place) != len(actions):
                raise ValueError(f"{self.name}: stage {stage} does something twice")
            for micro_batch in range(self.micro_batches):
                for chunk in range(self.chunks):
                    own = [place.get(Action(kind, micro_batch, chunk), -1) for kind in kinds]
                    if -1 in own or own != sorted(own):
                        raise ValueError(
                            f"{self.name}: stage {stage} lacks or misplaces a part of micro-batch {micro_batch}"
                        )
            if len(place) != self.micro_batches * self.chunks * len(kinds):
                raise ValueError(f"{self.name}: stage {stage} does more than there is")
        return self

    def held(self, stage: int) -> int:
        """Most micro-batches x chunks of which the stage holds activations at a time. Those that a split backward
        still needs for the weights count until then."""
        last = Kind.WEIGHTS if self.split else Kind.BACKWARD
        now = most = 0
        for action in self.actions[stage]:
            now += (action.kind is Kind.FORWARD) - (action.kind is last)
            most = max(most, now)
        return most


def place_on_chain(chunk: int, stage: int, stages: int, zigzag: bool) -> int:
    """The number of a chunk of a stage on the way of a micro-batch through the model."""
    back = zigzag and chunk % 2
    return chunk * stages + (stages - 1 - stage if back else stage)


def stage_on_chain(number: int, stages: int, zigzag: bool) -> int:
    """The stage that holds a chunk, by the number of the chunk on that way."""
    chunk, place = divmod(number, stages)
    return stages - 1 - place if zigzag and chunk % 2 else place


@dataclass(frozen=True, slots=True)
class Simulation:
    """``times[s]``: start and end of each action of stage ``s``."""

    order: Order
    times: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def makespan(self) -> float:
        return max(stage[-1][1] for stage in self.times)

    @property
    def bubble(self) -> float:
        """The share of the time, from the first start to the last end, in which a stage does nothing: the mean over
        stages. Time after a stage's last action counts: an update waits for all."""
        busy = [sum(end - start for start, end in stage) for stage in self.times]
        return 1 - sum(busy) / (len(busy) * self.makespan)

    def chart(self, width: float = 1.0) -> str:
        """One line per stage, one column per ``width`` of time."""
        lines = []
        for stage, (actions, times) in enumerate(zip(self.order.actions, self.times, strict=True)):
            cells = ["."] * round(self.makespan / width)
            for action, (start, end) in zip(actions, times, strict=True):
                for cell in range(round(start / width), round(end / width)):
                    cells[cell] = str(action)
            lines.append(f"stage {stage}: " + " ".join(f"{cell:>4}" for cell in cells))
        return "\n".join(lines)


class DeadlockError(ValueError):
    """Stages wait for each other in a circle."""


def _needs(
    action: Action, stage: int, ends: dict[tuple[Kind, int, int], float], order: Order
) -> float | None:
    """When what an action needs from other chunks has arrived, without the time to send it; None: not yet."""
    number = order.chain(action.chunk, stage)
    if action.kind is Kind.FORWARD:
        return 0.0 if number == 0 else ends.get((Kind.FORWARD, action.micro_batch, number - 1))
    if action.kind is Kind.BACKWARD and number < order.stages * order.chunks - 1:
        return ends.get((Kind.BACKWARD, action.micro_batch, number + 1))
    return 0.0


def simulate(order: Order, durations: Durations | Sequence[Durations] = Durations()) -> Simulation:
    """When everything would happen, with ``durations`` for all stages or one each. DeadlockError: never.

    A send overlaps computation, and arrives ``send`` after the end of the action that made it.
    """
    each = [durations] * order.stages if isinstance(durations, Durations) else list(durations)
    ends: dict[tuple[Kind, int, int], float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in order.actions]
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(order.actions):
            while len(times[stage]) < len(actions):
                action = actions[len(times[stage])]
                ready = _needs(action, stage, ends, order)
                if ready is None:
                    break
                free = times[stage][-1][1] if times[stage] else 0.0
                start = max(free, ready + each[stage].send if ready else 0.0)
                end = start + each[stage].of(action, split=order.split)
                times[stage].append((start, end))
                ends[action.kind, action.micro_batch, order.chain(action.chunk, stage)] = end
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
    """1F1B: stage ``s`` holds at most ``stages - s`` micro-batches; bubble ``(p - 1) / (m + p - 1)``."""
    actions = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, micro_batches)
        own = [Action(Kind.FORWARD, number) for number in range(ahead)]
        for number in range(micro_batches):
            if number + ahead < micro_batches:
                own.append(Action(Kind.FORWARD, number + ahead))
            own.append(Action(Kind.BACKWARD, number))
        actions.append(tuple(own))
    return Order("1f1b", micro_batches, tuple(actions)).check()


def forward_only(stages: int, micro_batches: int, chunks: int = 1, *, zigzag: bool = False) -> Order:
    """Evaluation: as many micro-batches as there are stages pass a chunk before the next chunk begins."""
    own = [
        Action(Kind.FORWARD, number, chunk)
        for start in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for number in range(start, min(start + stages, micro_batches))
    ]
    return Order("inference", micro_batches, (tuple(own),) * stages, chunks=chunks, zigzag=zigzag)


def interleaved(stages: int, micro_batches: int, chunks: int) -> Order:
    """Interleaved 1F1B: each stage holds ``chunks`` runs of layers, and the bubble is ``chunks`` times smaller.
    ValueError: ``stages`` does not divide ``micro_batches``."""
    if micro_batches % stages:
        raise ValueError(
            f"interleaved 1F1B needs a number of micro-batches that {stages} stages divide, not {micro_batches}"
        )
    total = micro_batches * chunks

    def action(kind: Kind, number: int) -> Action:
        """The ``number``-th of its kind: ``stages`` micro-batches through each chunk in turn."""
        turn, within = divmod(number, stages * chunks)
        chunk, offset = divmod(within, stages)
        return Action(kind, turn * stages + offset, chunk if kind is Kind.FORWARD else chunks - 1 - chunk)

    actions = []
    for stage in range(stages):
        ahead = min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)
        own = [action(Kind.FORWARD, number) for number in range(ahead)]
        for number in range(total):
            if number + ahead < total:
                own.append(action(Kind.FORWARD, number + ahead))
            own.append(action(Kind.BACKWARD, number))
        actions.append(tuple(own))
    return Order("interleaved", micro_batches, tuple(actions), chunks=chunks).check()


def zero_bubble(
    stages: int, micro_batches: int, *, durations: Durations = Durations(), held: int | None = None
) -> Order:
    """Backwards split into B and W, one chunk per stage: W fills what would be bubbles.

    ``held``: of how many micro-batches a stage may hold activations; default ``stages``, the most that 1F1B holds.
    With ``2 stages - 1`` no bubble is left between the first B and the last.
    """
    limit = stages if held is None else held
    found = [
        _greedy("zero-bubble", stages, micro_batches, 1, False, assumed, limit)
        for assumed in _assumptions(durations, stages * micro_batches)
    ]
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
    durations: Durations = Durations(),
    held: int | None = None,
) -> Order:
    """The same over several chunks per stage, of which every second one is passed in the opposite direction: with two,
    the last chunk is on the first stage, so that its backwards begin at once. The wait for the first micro-batch is
    ``chunks`` times shorter. ``zigzag=False``: round and round. ``held`` counts chunks: ``chunks stages`` is what 1F1B
    holds. ``durations`` are those of a chunk."""
    limit = chunks * stages if held is None else held
    name = "zero-bubble-v" if zigzag else "zero-bubble"
    found = [
        _greedy(name, stages, micro_batches, chunks, zigzag, assumed, limit)
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
    return list(dict.fromkeys((durations, Durations(), *others)))


_ORDERINGS: tuple[Callable[[Action], tuple[int, ...]], ...] = (
    lambda action: (action.micro_batch, -action.chunk),
    lambda action: (-action.chunk, action.micro_batch),
)


def _greedy(
    name: str, stages: int, micro_batches: int, chunks: int, zigzag: bool, durations: Durations, limit: int
) -> Order:
    """The best of a few greedy schedules: whenever a stage is free it takes what others wait for most."""
    found = [
        _run_greedily(name, stages, micro_batches, chunks, zigzag, durations, limit, ordering, eager)
        for ordering in _ORDERINGS[: 1 if chunks == 1 else None]
        for eager in (False, True)
    ]
    orders = [order for order in found if order is not None]
    if not orders:
        raise ValueError(f"{name}: {limit} micro-batches are too few for {stages} stages")
    return min(orders, key=lambda order: simulate(order, durations).makespan).check()


def _run_greedily(
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    zigzag: bool,
    durations: Durations,
    limit: int,
    ordering: Callable[[Action], tuple[int, ...]],
    eager: bool,
) -> Order | None:
    """Event by event. B goes before F, F before W; W where nothing else is ready, or where activations are at their
    limit. ``eager``: a W is done only if it ends before the next B or F could begin, unless memory asks for it."""
    plan = Order(name, micro_batches, ((),) * stages, chunks, True, zigzag)
    ends: dict[tuple[Kind, int, int], float] = {}
    done: list[list[Action]] = [[] for _ in range(stages)]
    free = [0.0] * stages
    held = [0] * stages
    left = [
        {(kind, chunk): 0 for kind in (Kind.FORWARD, Kind.BACKWARD) for chunk in range(chunks)}
        for _ in range(stages)
    ]  # the next micro-batch of each kind: they keep their order
    weights: list[list[Action]] = [[] for _ in range(stages)]

    def next_of(stage: int) -> tuple[float, int, int, tuple[int, ...], Action] | None:
        """What the stage would do next, behind its key: when it could begin, and how much others wait for it."""
        best: tuple[float, int, int, tuple[int, ...], Action] | None = None
        for (kind, chunk), micro_batch in left[stage].items():
            action = Action(kind, micro_batch, chunk)
            ready = _needs(action, stage, ends, plan)
            if action.kind is Kind.BACKWARD:
                own = ends.get((Kind.FORWARD, action.micro_batch, plan.chain(action.chunk, stage)))
                ready = None if ready is None or own is None else max(ready, own)
            elif held[stage] + (chunks - 1 - action.chunk) >= limit:
                ready = None
            if ready is None:
                continue
            start = max(free[stage], ready + durations.send if ready else 0.0)
            key = (start, 0 if action.kind is Kind.BACKWARD else 1, stage, ordering(action), action)
            if best is None or key[:4] < best[:4]:
                best = key
        if weights[stage]:
            start = free[stage] + (0.0 if not eager else 1e-9)
            key = (start, 2, stage, (0,), weights[stage][0])
            if best is None or key[:4] < best[:4]:
                best = key
        return best

    coming = [next_of(stage) for stage in range(stages)]
    while any(left) or any(weights):
        best = min((each for each in coming if each is not None), key=lambda each: each[:4], default=None)
        if best is None:
            return None
        start, _, stage, _, action = best
        end = start + durations.of(action, split=True)
        free[stage] = end
        done[stage].append(action)
        if action.kind is Kind.WEIGHTS:
            weights[stage].pop(0)
            held[stage] -= 1
            coming[stage] = next_of(stage)
            continue
        left[stage][action.kind, action.chunk] += 1
        if action.micro_batch + 1 == micro_batches:
            del left[stage][action.kind, action.chunk]
        number = plan.chain(action.chunk, stage)
        ends[action.kind, action.micro_batch, number] = end
        if action.kind is Kind.FORWARD:
            held[stage] += 1
        else:
            weights[stage].append(Action(Kind.WEIGHTS, action.micro_batch, action.chunk))
        coming[stage] = next_of(stage)
        after = number + (1 if action.kind is Kind.FORWARD else -1)  # what has waited for this
        if 0 <= after < stages * chunks:
            other = stage_on_chain(after, stages, zigzag)
            coming[other] = next_of(other)
    return Order(name, micro_batches, tuple(map(tuple, done)), chunks, True, zigzag)
