"""`wall_clock_breakdown`: time spent in each part of an optimizer step, on every rank."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from deepspeed import comm as dist
from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import is_rank_zero, print_dist
from deepspeed.comm.timed import WaitTime
from deepspeed.observe import timer

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine

EVERY = 10
"""Steps between exchanges of the ranks' times, if `steps_per_print` is unset."""
MAX_RANKS = 16
"""Up to this number of ranks all times are shown; beyond it only the smallest and largest."""
COMPARED_TIMERS = (timer.EXPOSED_COMMUNICATION_TIMER, timer.DATA_TIMER)
"""Timers that are compared between ranks."""


class WallClockBreakdown:
    """Milliseconds of forward, backward and step, and of waits for other ranks and for data, summed over each step.

    ``bwd_inner`` is the part of backward that computes gradients, ``bwd_allreduce`` the exposed time of their
    reduction. ``exposed_comm`` is part of these: collectives and pipeline messages during which this rank (on a
    device: its stream) did nothing else. ``data`` is outside: from a step to the next forward, including the script's
    own work. ``elapsed_ms`` holds the sums of this rank's last step, ``step_waits_ms`` the part of ``exposed_comm``
    within ``step``; None on a device, where only the total is known.
    """

    SPANS = (
        ("before_forward", "after_forward", timer.FORWARD_GLOBAL_TIMER),
        ("before_backward", "after_backward", timer.BACKWARD_GLOBAL_TIMER),
        ("before_backward", "before_reduction", timer.BACKWARD_INNER_GLOBAL_TIMER),
        ("before_reduction", "after_backward", timer.BACKWARD_REDUCE_GLOBAL_TIMER),
        ("before_step", "after_step", timer.STEP_GLOBAL_TIMER),
    )

    def __init__(self, engine: Engine, interval: int | None = None) -> None:
        self.engine = engine
        self.elapsed_ms: dict[str, float] = {}
        self.step_waits_ms: float | None = None
        self._waited, self._before_step = 0.0, 0.0
        self.names = [name for _, _, name in self.SPANS] + list(COMPARED_TIMERS)
        self._interval = interval or EVERY
        self._sums = dict.fromkeys(COMPARED_TIMERS, 0.0)
        self._of_ranks: list[tuple[int, dict[str, float]]] = []
        self._waits = WaitTime(
            None if get_accelerator().use_host_timers() else engine.timers(timer.EXPOSED_COMMUNICATION_TIMER)
        )
        self._listen()
        self.steps = engine.global_steps
        engine.events.on("after_step", self.report)
        engine.events.on("after_step", lambda **_: self.begin(timer.DATA_TIMER))
        # Check the class: an engine also has its module's attributes.
        if hasattr(type(engine), "pipe_channels"):
            engine.events.on("before_forward", self._wait_in_pipeline)
        engine._network.waits = self._waits

    def _listen(self) -> None:
        on = self.engine.events.on
        for event in ("before_forward", "before_step"):  # a pipeline may run no forward of the engine
            on(event, lambda **_: self.end(timer.DATA_TIMER))
        # Where one span ends and the next begins, or nested spans end first.
        for _, after, name in reversed(self.SPANS):
            on(after, lambda name=name, **_: self.end(name))
        for before, _, name in self.SPANS:
            on(before, lambda name=name, **_: self.begin(name))
        if self._waits.span is None:
            on("before_step", self._step_begins)
            on("after_step", self._step_ends)

    def _step_begins(self, **_: Any) -> None:
        self._before_step = self._waits.seconds

    def _step_ends(self, **_: Any) -> None:
        self._waited += self._waits.seconds - self._before_step

    def _wait_in_pipeline(self, **_: Any) -> None:
        """Time the channels' waits; they are made after the observers, so this runs at the first forward."""
        engine: Any = self.engine
        engine.events.off("before_forward", self._wait_in_pipeline)
        around = self._waits.around
        for _, channel in engine.pipe_channels():
            if getattr(channel, "peer", None) is not None:  # not between two pieces of this rank
                name = "receive" if hasattr(channel, "receive") else "flush"
                call = getattr(channel, name)
                setattr(channel, name, functools.partial(around, call))

    def begin(self, name: str) -> None:
        started = self.engine.timers(name)
        started.cancel()  # a timer still running belongs to a failed pass
        started.start()

    def end(self, name: str) -> None:
        started = self.engine.timers(name)
        if started.started_:
            started.stop()

    def report(self, **_: Any) -> None:
        if self.engine.global_steps == self.steps:
            return
        timers, self.steps = self.engine.timers, self.engine.global_steps
        on_host = self._waits.take()
        if self._waits.span is None:
            timers(timer.EXPOSED_COMMUNICATION_TIMER).add(on_host)
            self.step_waits_ms, self._waited = self._waited * 1e3, 0.0
        self.elapsed_ms |= {name: timers(name).elapsed(reset=False) for name in self.names}
        timers.log(self.names, reset=True, ranks=[0])
        for name in COMPARED_TIMERS:
            self._sums[name] += self.elapsed_ms[name]
        if self.steps % self._interval == 0:
            self._exchange_times()

    # All ranks ------------------------------------------------------------------------------------------------

    def _exchange_times(self) -> None:
        """Gather every rank's means since the last exchange. Collective."""
        sums, self._sums = self._sums, dict.fromkeys(COMPARED_TIMERS, 0.0)
        ranks = self.engine.world_size
        if ranks == 1:
            return
        own = torch.tensor(
            [sums[name] / self._interval for name in COMPARED_TIMERS], device=self.engine.device
        )
        every = own.new_empty(ranks * len(COMPARED_TIMERS))
        dist.all_gather_into_tensor(every, own)
        if is_rank_zero():
            rows = every.view(ranks, len(COMPARED_TIMERS)).tolist()
            self._of_ranks = _shown([dict(zip(COMPARED_TIMERS, row, strict=True)) for row in rows])
            for name in COMPARED_TIMERS:
                shown = [f"{rank}: {times[name]:.2f}" for rank, times in self._of_ranks if name in times]
                print_dist(f"{name} (ms) by rank: {' | '.join(shown)}", ranks=[0])

    def take_ranks(self) -> list[tuple[int, dict[str, float]]]:
        """Return rank -> mean milliseconds since the last exchange, once; empty otherwise. On rank 0."""
        taken, self._of_ranks = self._of_ranks, []
        return taken


def _shown(times: list[dict[str, float]]) -> list[tuple[int, dict[str, float]]]:
    """Return the times to show: of all ranks, or of many, only the smallest and largest of each timer."""
    if len(times) <= MAX_RANKS:
        return list(enumerate(times))
    found: dict[int, dict[str, float]] = {}
    for name in COMPARED_TIMERS:
        order = sorted(range(len(times)), key=lambda rank: times[rank][name])
        for rank in (order[0], order[-1]):
            found.setdefault(rank, {})[name] = times[rank][name]
    return sorted(found.items())
