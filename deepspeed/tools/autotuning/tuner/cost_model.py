"""Cost models of experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class XGBoostCostModel:
    """Regression by gradient boosting of decision stumps (J. Friedman: Greedy function approximation, 2001), without
    the XGBoost library.

    Args:
        loss_type: ``"reg"``: squared error; ``"rank"``: squared error of the ranks of the values.
        num_threads, log_interval, upper_model: Accepted without effect.
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
        """Fit the model. ``xs``: a row of features per experiment; ``ys``: the measured values."""
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
        """Return the predicted value of each row."""
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
    """Return the stump (column, threshold, mean below, mean above) that explains most of the residuals ``left``; None
    if none gains more than ``least``."""
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

    def plateau(self, loss: float) -> int:
        """Return the micro-batch size in samples above which larger ones gain less than this share of throughput."""
        return max(1, round(self.fixed / (self.per_sample * loss))) if self.per_sample else 1 << 20
