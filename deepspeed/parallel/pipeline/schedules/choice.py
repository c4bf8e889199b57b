"""Choice of a batch's order: the one that ``pipeline.schedule`` names, or the fastest for measured durations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.parallel.pipeline.schedules import orders
from deepspeed.parallel.pipeline.schedules.orders import ActionKind, Durations, Order, simulate
from deepspeed.parallel.pipeline.schedules.zero_bubble import zero_bubble, zero_bubble_v

AUTO = "auto"
_SPLIT_WARM, _SPLIT, _WHOLE, _CHOSEN = range(4)  # phases of "auto", one per batch until an order is chosen


@dataclass(frozen=True, slots=True)
class ScheduleLayout:
    """Arrangement of the layers: ``chunks`` per stage, assigned round-robin, or back and forth (``zigzag``)."""

    stages: int
    chunks: int = 1
    zigzag: bool = False

    def __str__(self) -> str:
        if self.chunks == 1:
            return "a PipelineModule with one chunk per stage"
        return f"PipelineModule(chunks={self.chunks}, zigzag={self.zigzag})"


@dataclass(frozen=True, slots=True)
class Limits:
    """Constraints of an order. ``held``: micro-batches whose activations a stage may hold; 0: as many as 1F1B."""

    held: int = 0
    durations: Durations = orders.TYPICAL

    def chunks(self, layout: ScheduleLayout) -> int:
        return (self.held or layout.stages) * layout.chunks


def _one_forward_one_backward(layout: ScheduleLayout, micro_batches: int, limits: Limits) -> Order:
    return orders.one_forward_one_backward(layout.stages, micro_batches)


def _interleaved(layout: ScheduleLayout, micro_batches: int, limits: Limits) -> Order:
    return orders.interleaved(layout.stages, micro_batches, layout.chunks)


def _zero_bubble(layout: ScheduleLayout, micro_batches: int, limits: Limits) -> Order:
    stages, chunks, held = layout.stages, layout.chunks, limits.chunks(layout)
    if chunks == 1:
        return zero_bubble(stages, micro_batches, durations=limits.durations, held=held)
    return zero_bubble_v(
        stages, micro_batches, chunks, zigzag=layout.zigzag, durations=limits.durations, held=held
    )


Maker = Callable[[ScheduleLayout, int, Limits], Order]


def makers(layout: ScheduleLayout) -> Mapping[str, Maker]:
    """Return the makers of the orders that a layout supports, by value of ``pipeline.schedule``. The first one has no
    split backwards, if there is such an order."""
    if layout.zigzag:
        return {"zero-bubble-v": _zero_bubble}
    if layout.chunks > 1:
        return {"interleaved": _interleaved, "1f1b": _interleaved, "zero-bubble": _zero_bubble}
    return {"1f1b": _one_forward_one_backward, "zero-bubble": _zero_bubble}


@dataclass(slots=True)
class OrderChoice:
    """Chooses the order of the next batch. DeepSpeedConfigError: the layout does not support the schedule.

    "auto" runs its first batches with and without split backwards and times them (``timed``, ``learn``); then it picks
    the order with the shortest simulated batch. All orders give bit-identical results.
    """

    schedule: str
    layout: ScheduleLayout
    held: int = 0
    phase: int = _CHOSEN
    chosen: str = ""
    _durations: dict[str, list[Durations]] = field(default_factory=dict)
    _known: Order | None = None

    def __post_init__(self) -> None:
        known = makers(self.layout)
        if self.schedule == AUTO:
            self.chosen = next(iter(known))
            self.phase = _SPLIT_WARM if len(known) > 1 and self.layout.stages > 1 else _CHOSEN
            return
        if self.schedule not in known:
            raise DeepSpeedConfigError(
                f"pipeline.schedule={self.schedule!r} does not support {self.layout}: use {', '.join(known)} or auto. "
                "chunks=2 is for interleaved and zero-bubble, with zigzag=True for zero-bubble-v"
            )
        self.chosen = self.schedule

    @property
    def timed(self) -> bool:
        """Return whether the next batch is to be timed."""
        return self.phase in (_SPLIT, _WHOLE)

    @property
    def may_split(self) -> bool:
        """Return whether an order with split backwards is possible."""
        return self.chosen.startswith("zero-bubble") or self.phase != _CHOSEN

    def order(self, micro_batches: int) -> Order:
        if self._known is None or self._known.micro_batches != micro_batches:
            try:
                self._known = self._make(self._current(), micro_batches)
            except DeepSpeedConfigError:
                # Interleaved 1F1B, and the stages do not divide the number of micro-batches.
                if self.schedule != AUTO:
                    raise
                self.phase, self.chosen = _CHOSEN, "zero-bubble"
                self._known = self._make(self.chosen, micro_batches)
        return self._known

    def _current(self) -> str:
        return "zero-bubble" if self.phase in (_SPLIT_WARM, _SPLIT) else self.chosen

    def _make(self, name: str, micro_batches: int) -> Order:
        limits = Limits(self.held)
        if "zero-bubble" in self._durations:
            limits = Limits(self.held, _slowest(self._durations["zero-bubble"]))
        try:
            return makers(self.layout)[name](self.layout, micro_batches, limits)
        except ValueError as error:
            raise DeepSpeedConfigError(f"pipeline.schedule={self.schedule!r}: {error}") from error

    def learn(self, seconds: Mapping[ActionKind, Sequence[float]], stage: int, device: torch.device) -> None:
        """Record what this stage measured in a batch, and move to the next phase. Collective over all ranks, which
        reach the same decision."""
        if self.phase == _CHOSEN:
            return
        if self.timed:
            own = [median(seconds.get(kind) or [0.0]) for kind in ActionKind]
            self._durations[self._current()] = _exchanged(own, stage, self.layout.stages, device)
        self.phase += 1
        micro_batches = self._known.micro_batches if self._known is not None else 1
        self._known = None
        if self.phase == _CHOSEN:
            self.chosen = min(
                (self.chosen, "zero-bubble"),
                key=lambda name: simulate(self._make(name, micro_batches), self._durations[name]).makespan,
            )


def _slowest(durations: Sequence[Durations]) -> Durations:
    return Durations(
        max(each.forward for each in durations),
        max(each.backward for each in durations),
        max(each.weights for each in durations),
    )


def _exchanged(own: Sequence[float], stage: int, stages: int, device: torch.device) -> list[Durations]:
    """Return each stage's durations, the maximum over its replicas."""
    table = torch.zeros(stages, len(own), dtype=torch.float32, device=device)
    table[stage] = torch.tensor(own)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return [Durations(*row) for row in table.tolist()]
