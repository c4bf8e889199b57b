"""Models of what an experiment will measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class XGBoostCostModel:
    """Regression by gradient boosting of shallow trees (J. Friedman: Greedy function approximation, 2001), without the
    library of that name.

    Args:
        loss_type: ``"reg"``: squared error; ``"rank"``: the same, of ranks instead of values.
        num_threads, log_interval, upper_model: Accepted, of no effect.
    """

    ROUNDS, RATE, MIN_GAIN = 200, 0.1, 1e-12

    def __init__(
        self, loss_type: str, num_threads: int | None = None, log_interval: int = 25, upper_model: Any = None
    ) -> None:
        if loss_type not in ("reg", "rank"):
            raise ValueError(f"loss_type={loss_type!r}: 'reg' or 'rank'")
        self.loss_type = loss_type
        self._base = 0.0
        self._trees: list[tuple[int, float, float, float]] = []

    def fit(self, xs: Any, ys: Any) -> None:
        """``xs``: a row of numbers per experiment; ``ys``: what was measured."""
        rows = np.asarray(xs, dtype=np.float64)
        rows = rows.reshape(len(rows), -1)
        wanted = np.asarray(ys, dtype=np.float64)
        if self.loss_type == "rank":
            wanted = wanted.argsort().argsort().astype(np.float64)
        self._base, self._trees = float(wanted.mean()), []
        left = wanted - self._base
        for _ in range(self.ROUNDS):
            tree = _best_split(rows, left, self.MIN_GAIN)
            if tree is None:
                return
            self._trees.append(tree)
            left = left - self.RATE * _leaf(tree, rows)

    def predict(self, xs: Any) -> np.ndarray:
        """Return the expected value of each row."""
        rows = np.asarray(xs, dtype=np.float64)
        rows = rows.reshape(len(rows), -1)
        total = np.full(len(rows), self._base)
        for tree in self._trees:
            total += self.RATE * _leaf(tree, rows)
        return total


def _leaf(tree: tuple[int, float, float, float], rows: np.ndarray) -> np.ndarray:
    column, threshold, below, above = tree
    return np.where(rows[:, column] <= threshold, below, above)


def _best_split(rows: np.ndarray, left: np.ndarray, least: float) -> tuple[int, float, float, float] | None:
    """The column and threshold whose two means explain most of what is left."""
    best, gain = None, least
    for column in range(rows.shape[1]):
        values = np.unique(rows[:, column])
        for threshold in (values[:-1] + values[1:]) / 2:
            under = rows[:, column] <= threshold
            below, above = left[under].mean(), left[~under].mean()
            found = under.sum() * below**2 + (~under).sum() * above**2
            if found > gain:
                best, gain = (column, float(threshold), float(below), float(above)), found
    return best


@dataclass
class StepTimeModel:
    """Seconds of an optimizer step: each micro-batch takes a fixed time and one that grows with its samples, which two
    runs of different size tell; stages differ by a factor each, 1 until one was measured there."""

    fixed: float = 0.0
    per_sample: float = 0.0
    factors: dict[int, float] = field(default_factory=dict)

    def fit(self, runs: Sequence[tuple[int, int, float]]) -> None:
        """``runs``: (stage, samples of a micro-batch, seconds per micro-batch)."""
        stages = {stage for stage, _, _ in runs}
        most = max(stages, key=lambda stage: len({size for at, size, _ in runs if at == stage}))
        same = [(size, seconds) for stage, size, seconds in runs if stage == most]
        sizes = np.array([size for size, _ in same], dtype=np.float64)
        times = np.array([seconds for _, seconds in same])
        if len(set(sizes)) > 1:
            slope, fixed = np.polyfit(sizes, times, 1)
            self.per_sample, self.fixed = max(float(slope), 0.0), max(float(fixed), 0.0)
        else:  # all of it grows with the size: larger ones are not taken to be better
            self.per_sample, self.fixed = float((times / sizes).mean()), 0.0
        self.factors = {}
        for stage in stages:
            measured = [seconds / self._alike(size) for at, size, seconds in runs if at == stage]
            self.factors[stage] = float(np.mean(measured))

    def _alike(self, size: int) -> float:
        return (self.fixed + self.per_sample * size) or 1e-9

    def seconds(self, stage: int, size: int) -> float:
        """Return the seconds of one micro-batch."""
        return self.factor(stage) * self._alike(size)

    def factor(self, stage: int) -> float:
        """Measured, or that of the next lower stage that was: a higher one communicates as much or more."""
        below = [known for known in self.factors if known <= stage]
        return self.factors[max(below)] if below else min(self.factors.values(), default=1.0)

    def plateau(self, loss: float) -> int:
        """Samples of a micro-batch from which on larger ones gain less than this share of throughput."""
        return max(1, round(self.fixed / (self.per_sample * loss))) if self.per_sample else 1 << 20
