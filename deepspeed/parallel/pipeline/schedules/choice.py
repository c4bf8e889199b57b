"""Choice of a batch's order: the one that ``pipeline.schedule`` names, or the fastest for measured durations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.parallel.pipeline.schedules import orders
from deepspeed.parallel.pipeline.schedules.orders import ActionKind, Durations, Order, simulate
from deepspeed.parallel.pipeline.schedules.zero_bubble import zero_bubble

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


def makers(
    layout: ScheduleLayout, held: int = 0, durations: Durations = orders.TYPICAL
) -> Mapping[str, Callable[[int], Order]]:
    """Return the makers of the orders that a layout supports, by value of ``pipeline.schedule``: functions of the
    number of micro-batches. The first one has no split backwards, if there is such an order. ``held``: micro-batches
    whose activations a stage may hold; 0: as many as 1F1B."""
    stages, chunks = layout.stages, layout.chunks

    def split(micro_batches: int) -> Order:
        most = (held or stages) * chunks
        return zero_bubble(
            stages, micro_batches, chunks, zigzag=layout.zigzag, durations=durations, held=most
        )

    def whole(micro_batches: int) -> Order:
        if chunks > 1:
            return orders.interleaved(stages, micro_batches, chunks)
        return orders.one_forward_one_backward(stages, micro_batches)

    if layout.zigzag:
        return {"zero-bubble-v": split}
    if chunks > 1:
        return {"interleaved": whole, "1f1b": whole, "zero-bubble": split}
    return {"1f1b": whole, "zero-bubble": split}


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
        durations = orders.TYPICAL
        if measured := self._durations.get("zero-bubble"):  # of each stage: the slowest counts
            durations = Durations(*map(max, zip(*map(astuple, measured), strict=True)))
        try:
            return makers(self.layout, self.held, durations)[name](micro_batches)
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


def _exchanged(own: Sequence[float], stage: int, stages: int, device: torch.device) -> list[Durations]:
    """Return each stage's durations, the maximum over its replicas."""
    table = torch.zeros(stages, len(own), dtype=torch.float32, device=device)
    table[stage] = torch.tensor(own)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return [Durations(*row) for row in table.tolist()]
