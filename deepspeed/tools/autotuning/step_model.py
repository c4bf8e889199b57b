"""Predicted step time of any point of the space, from measurements at a few points.

A step has four parts: compute, which `StepTimeModel` fits to two micro-batch sizes; exposed communication, proportional
to the bytes sent according to the plan; the update, proportional to the elements that a rank updates; and waiting for
data, proportional to the samples. Measurements near a point correct its prediction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepspeed.observe.timer import STEP_WAITS
from deepspeed.tools.autotuning.space import OFFLOAD, TENSOR, Point

HOST_BYTES_PER_S, BYTES_PER_ELEMENT = 8e9, 20
"""Prior for an update on the host: it reads and writes its states at memory bandwidth."""
FORWARD_SHARE = 0.3
"""Prior for the forward's share of a micro-batch's compute time."""
SPLIT_COSTS = 0.1
"""Prior for the relative overhead of tensor parallelism: activations are summed over ranks."""


@dataclass(frozen=True)
class PlannedPoint:
    """The plan's figures for a point: bytes sent per step, elements that a rank updates, bytes needed."""

    sent: float = 0.0
    owned: float = 0.0
    need: int = 0


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds of one step, by part."""

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


def step_breakdown(seconds: float, breakdown: Mapping[str, float] | None) -> StepBreakdown:
    """Split a measured step into its parts. ``breakdown``: milliseconds by the names of `wall_clock_breakdown`; None:
    only the total is known."""
    if not breakdown:
        return StepBreakdown(seconds)
    exposed = min(breakdown.get("exposed_comm", 0.0) / 1e3, seconds)
    # Unless measured: the exposed communication for which no backward waited at its end.
    elsewhere = breakdown.get("bwd_allreduce", 0.0) / 1e3
    in_step = breakdown.get(STEP_WAITS, max(0.0, exposed - elsewhere) * 1e3) / 1e3
    update = max(0.0, breakdown.get("step", 0.0) / 1e3 - in_step)
    data = breakdown.get("data", 0.0) / 1e3
    return StepBreakdown(max(0.0, seconds - exposed - update - data), exposed, update, data)


@dataclass
class StepTimeModel:
    """Seconds per micro-batch: a fixed time plus a time per sample, fitted to runs of two or more sizes, times a factor
    for the stage."""

    fixed: float = 0.0
    per_sample: float = 0.0
    factors: dict[int, float] = field(default_factory=dict)

    def fit(self, runs: Sequence[tuple[int, int, float]]) -> None:
        """Fit the model. ``runs``: (stage, micro-batch size in samples, seconds per micro-batch)."""
        stages = {stage for stage, _, _ in runs}
        most = max(stages, key=lambda stage: len({size for at, size, _ in runs if at == stage}))
        same = [(size, seconds) for stage, size, seconds in runs if stage == most]
        sizes = np.array([size for size, _ in same], dtype=np.float64)
        times = np.array([seconds for _, seconds in same])
        if len(set(sizes)) > 1:
            slope, fixed = np.polyfit(sizes, times, 1)
            self.per_sample, self.fixed = max(float(slope), 0.0), max(float(fixed), 0.0)
        else:  # one size only: assume time proportional to it, so that no larger size looks better
            self.per_sample, self.fixed = float((times / sizes).mean()), 0.0
        self.factors = {}
        for stage in stages:
            measured = [seconds / self._alike(size) for at, size, seconds in runs if at == stage]
            self.factors[stage] = float(np.mean(measured))

    def _alike(self, size: int) -> float:
        return (self.fixed + self.per_sample * size) or 1e-9

    def seconds(self, stage: int, size: int) -> float:
        """Return the predicted seconds of one micro-batch."""
        return self.factor(stage) * self._alike(size)

    def factor(self, stage: int) -> float:
        """Return the factor of a stage, or of the next lower measured one: a higher stage communicates at least as
        much. Without a lower one, the smallest; 1 before any measurement."""
        below = [known for known in self.factors if known <= stage]
        return self.factors[max(below)] if below else min(self.factors.values(), default=1.0)


@dataclass
class StepModel:
    """Predicts step times. ``planned``: returns the plan's figures for a point;
    ``has_device_memory``: whether the device has its own memory."""

    planned: Callable[[Point], PlannedPoint]
    has_device_memory: bool = False
    time: StepTimeModel = field(default_factory=StepTimeModel)
    rates: dict[str, float] = field(default_factory=dict)
    corrections: dict[Point, float] = field(default_factory=dict)
    forward_share: float = FORWARD_SHARE

    def fit(self, runs: Sequence[tuple[Point, float, Mapping[str, float] | None]]) -> None:
        """Fit the model. ``runs``: (point, seconds per step, breakdown)."""
        self.corrections = {}
        plain = [run for run in runs if not run[0].choices] or list(runs)
        known = [
            (point, step_breakdown(seconds, breakdown), breakdown) for point, seconds, breakdown in plain
        ]
        self.time = StepTimeModel()
        self.time.fit([(point.stage, point.size, parts.compute / point.gas) for point, parts, _ in known])
        shares = [
            b["fwd"] / 1e3 / parts.compute for _, parts, b in known if b and b.get("fwd") and parts.compute
        ]
        self.forward_share = min(0.5, statistics.fmean(shares)) if shares else FORWARD_SHARE
        self.rates = {
            "exposed": _rate((parts.exposed, self.planned(point).sent) for point, parts, _ in known),
            "update": _rate((parts.update, self.planned(point).owned) for point, parts, _ in known),
            "data": _rate((parts.data, point.size * point.gas) for point, parts, _ in known),
        }
        for point, seconds, _ in runs:
            expected = self.expected(point).total
            self.corrections[point] = seconds / expected if expected > 0 else 1.0

    def expected(self, point: Point) -> StepBreakdown:
        """Return the predicted parts of a step, before correction."""
        planned, changes = self.planned(point), point.changes
        split = int(changes.get(TENSOR) or 1)
        compute = point.gas * self.time.seconds(point.stage, point.size)
        compute *= 1 + self.forward_share * (1 - point.kept)
        if split > 1:
            compute *= (1 + SPLIT_COSTS) / split
        update = self.rates["update"] * planned.owned
        if self.has_device_memory and changes.get(f"{OFFLOAD}.device") == "cpu":
            share = float(changes.get(f"{OFFLOAD}.ratio", 1.0))
            update = (1 - share) * update + share * planned.owned * BYTES_PER_ELEMENT / HOST_BYTES_PER_S
        data = self.rates["data"] * point.size * point.gas
        return StepBreakdown(compute, self.rates["exposed"] * planned.sent, update, data)

    def seconds(self, point: Point) -> float:
        """Return the predicted seconds of one step."""
        return self.expected(point).total * self._correction(point)

    def _correction(self, point: Point) -> float:
        """Return the correction factor of the same point, else of the nearest size with the same choices, preferably at
        the same stage; 1 without one."""
        alike = [at for at in self.corrections if at.choices == point.choices]
        if not alike:
            return 1.0
        near = [at for at in alike if at.stage == point.stage] or alike
        distances = {at: (at != point, abs(math.log(at.size / point.size))) for at in near}
        return self.corrections[min(distances, key=lambda at: distances[at])]

    def plateau(self, loss: float, gas: int, parts: StepBreakdown) -> int:
        """Return the micro-batch size in samples above which larger ones gain less than this share of throughput. The
        cost spread over the samples is a micro-batch's fixed time and its share of the once-per-step time."""
        each = self.time.per_sample + self.rates.get("data", 0.0)
        fixed = self.time.fixed + (parts.exposed + parts.update) / gas
        return max(1, round(fixed / (each * loss))) if each else 1 << 20


def _rate(pairs: Any) -> float:
    """Return the median of seconds per unit over pairs with a positive amount; of two the lower, since a longer wait
    for the same bytes is noise."""
    found = sorted(seconds / amount for seconds, amount in pairs if amount > 0)
    return found[(len(found) - 1) // 2] if found else 0.0
