"""Predicted step time of any point of the space, from what was measured at a few.

A step consists of its micro-batches' computing, which `StepTimeModel` learns from two sizes; of exposed communication,
which goes with the bytes that the plan says are sent; of the update, which goes with the elements that a rank updates;
and of waiting for data, which goes with the samples. What was measured near a point corrects what is expected of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.observe.timer import STEP_WAITS
from deepspeed.tools.autotuning.space import OFFLOAD, TENSOR, Point
from deepspeed.tools.autotuning.tuner.cost_model import StepTimeModel

HOST_BYTES_PER_S, BYTES_PER_ELEMENT = 8e9, 20
"""An update on the host, before one was measured: it reads and writes its states at the speed of memory."""
FORWARD_SHARE = 0.3
"""Of the computing of a micro-batch, before it was measured."""
SPLIT_COSTS = 0.1
"""What splitting layers costs in addition, before it was measured: activations are summed over ranks."""


@dataclass(frozen=True)
class PlannedPoint:
    """The plan's figures for a point: bytes sent in a step, elements that a rank updates, bytes needed."""

    sent: float = 0.0
    owned: float = 0.0
    need: int = 0


@dataclass(frozen=True)
class Parts:
    """Seconds of one step."""

    compute: float
    exposed: float = 0.0
    update: float = 0.0
    data: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.update + self.data

    def as_dict(self) -> dict[str, float]:
        return {
            "compute": self.compute,
            "communication": self.exposed,
            "update": self.update,
            "data": self.data,
        }


def parts_of(seconds: float, breakdown: Mapping[str, float] | None) -> Parts:
    """Split a measured step into its parts. ``breakdown``: milliseconds by the names of `wall_clock_breakdown`; None:
    only the whole is known."""
    if not breakdown:
        return Parts(seconds)
    exposed = min(breakdown.get("exposed_comm", 0.0) / 1e3, seconds)
    # If it is not known: what no backward waited for at its end.
    elsewhere = breakdown.get("bwd_allreduce", 0.0) / 1e3
    in_step = breakdown.get(STEP_WAITS, max(0.0, exposed - elsewhere) * 1e3) / 1e3
    update = max(0.0, breakdown.get("step", 0.0) / 1e3 - in_step)
    data = breakdown.get("data", 0.0) / 1e3
    return Parts(max(0.0, seconds - exposed - update - data), exposed, update, data)


@dataclass
class StepModel:
    """``planned``: of a point; ``apart``: whether the device has its own memory."""

    planned: Callable[[Point], PlannedPoint]
    apart: bool = False
    time: StepTimeModel = field(default_factory=StepTimeModel)
    rates: dict[str, float] = field(default_factory=dict)
    corrections: dict[Point, float] = field(default_factory=dict)
    forward_share: float = FORWARD_SHARE

    def fit(self, runs: Sequence[tuple[Point, float, Mapping[str, float] | None]]) -> None:
        """``runs``: (point, seconds of a step, breakdown)."""
        self.corrections = {}
        plain = [run for run in runs if not run[0].choices] or list(runs)
        known = [(point, parts_of(seconds, breakdown), breakdown) for point, seconds, breakdown in plain]
        self.time = StepTimeModel()
        self.time.fit([(point.stage, point.size, parts.compute / point.gas) for point, parts, _ in known])
        shares = [
            b["fwd"] / 1e3 / (parts.compute or 1)
            for _, parts, b in known
            if b and b.get("fwd") and parts.compute
        ]
        self.forward_share = min(0.5, _mean(shares)) if shares else FORWARD_SHARE
        self.rates = {
            "exposed": _rate((parts.exposed, self.planned(point).sent) for point, parts, _ in known),
            "update": _rate((parts.update, self.planned(point).owned) for point, parts, _ in known),
            "data": _rate((parts.data, point.size * point.gas) for point, parts, _ in known),
        }
        for point, seconds, _ in runs:
            expected = self.expected(point).total
            self.corrections[point] = seconds / expected if expected > 0 else 1.0

    def expected(self, point: Point) -> Parts:
        """Return the parts of a step before corrections."""
        planned, changes = self.planned(point), point.changes
        split = int(changes.get(TENSOR) or 1)
        compute = point.gas * self.time.seconds(point.stage, point.size)
        compute *= 1 + self.forward_share * (1 - point.kept)
        if split > 1:
            compute *= (1 + SPLIT_COSTS) / split
        update = self.rates["update"] * planned.owned
        if self.apart and changes.get(f"{OFFLOAD}.device") == "cpu":
            share = float(changes.get(f"{OFFLOAD}.ratio", 1.0))
            update = (1 - share) * update + share * planned.owned * BYTES_PER_ELEMENT / HOST_BYTES_PER_S
        data = self.rates["data"] * point.size * point.gas
        return Parts(compute, self.rates["exposed"] * planned.sent, update, data)

    def seconds(self, point: Point) -> float:
        """Return the predicted seconds of one step."""
        return self.expected(point).total * self._correction(point)

    def _correction(self, point: Point) -> float:
        """Return the correction of the same point, else of the same choices, if possible at the same stage, at the
        nearest size."""
        alike = [at for at in self.corrections if at.choices == point.choices]
        if not alike:
            return 1.0
        near = [at for at in alike if at.stage == point.stage] or alike
        apart = {at: (at != point, abs(math.log(at.size / point.size))) for at in near}
        return self.corrections[min(apart, key=lambda at: apart[at])]

    def plateau(self, loss: float, gas: int = 1, parts: Parts | None = None) -> int:
        """Samples of a micro-batch from which on larger ones gain less than this share of throughput: what is spread
        over the samples is the fixed part of a micro-batch and its share of what a step takes once."""
        each = self.time.per_sample + self.rates.get("data", 0.0)
        once = 0.0 if parts is None else (parts.exposed + parts.update) / gas
        fixed = self.time.fixed + once
        return max(1, round(fixed / (each * loss))) if each else 1 << 20


def _rate(pairs: Any) -> float:
    """Seconds per unit: the median of those that have any; of two the lower, as only chance makes a rank wait longer
    for the same bytes."""
    found = sorted(seconds / amount for seconds, amount in pairs if amount > 0)
    return found[(len(found) - 1) // 2] if found else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
