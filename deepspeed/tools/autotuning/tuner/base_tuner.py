"""The base of all tuners: run experiments until enough have been tried, and keep the best."""

from __future__ import annotations

import random
from typing import Any

from deepspeed.base.logging import logger
from deepspeed.tools.autotuning.utils import write_experiments


def better(metric: str, one: float | None, other: float | None) -> bool:
    """Tell whether the first value of the metric is better; no value is worse than any."""
    if one is None or other is None:
        return one is not None
    return one < other if metric == "latency" else one > other


class BaseTuner:
    """Runs experiments in an order that subclasses choose.

    Args:
        exps: Experiments: dicts with ``name``, ``ds_config``, ``num_gpus`` and ``num_nodes``.
        resource_manager: Runs them and reads their results.
        metric: latency, throughput or flops.
    """

    def __init__(self, exps: list[dict[str, Any]], resource_manager: Any, metric: str) -> None:
        self.all_exps = list(exps)
        self.rm = resource_manager
        self.metric = metric
        self.best_iter = 0
        self.best_exp: dict[str, Any] | None = None
        self.best_metric_val: float | None = None

    def has_next(self) -> bool:
        """Tell whether experiments are left."""
        return len(self.all_exps) > 0

    def next_batch(self, sample_size: int) -> list[dict[str, Any]]:
        """Up to ``sample_size`` experiments to run next, taken off those that are left."""
        raise NotImplementedError("which experiment comes next is what a tuner decides")

    def update(self) -> None:
        """Learn from the results so far."""

    def tune(self, sample_size: int = 1, n_trials: int = 1000, early_stopping: int | None = None) -> int:
        """Run up to ``n_trials`` experiments, ``sample_size`` at a time; stop after ``early_stopping`` without a better
        one. Returns how many ran."""
        tried = 0
        while tried < n_trials and self.has_next():
            batch = self.next_batch(min(sample_size, n_trials - tried))
            if not batch:
                break
            self.rm.schedule_experiments(write_experiments(batch, self.rm.exps_dir))
            self.rm.run()
            tried += len(batch)
            exp, value = self.rm.parse_results(self.metric)
            if exp is not None and better(self.metric, value, self.best_metric_val):
                self.best_exp, self.best_metric_val, self.best_iter = exp, value, tried
            self.update()
            self.rm.clear()
            if early_stopping and tried >= self.best_iter + early_stopping:
                logger.info("autotuning: no better experiment among the last %d", early_stopping)
                break
        return tried


# Tuners that do not learn: in order, or at random.


class RandomTuner(BaseTuner):
    """Experiments in a random order, the same in every run."""

    def __init__(self, exps: list[dict[str, Any]], resource_manager: Any, metric: str) -> None:
        super().__init__(exps, resource_manager, metric)
        self._random = random.Random(len(exps))

    def next_batch(self, sample_size: int = 1) -> list[dict[str, Any]]:
        batch = self._random.sample(self.all_exps, min(sample_size, len(self.all_exps)))
        self.all_exps = [exp for exp in self.all_exps if exp not in batch]
        return batch


class GridSearchTuner(BaseTuner):
    """Experiments in the order in which they were given."""

    def __init__(self, exps: list[dict[str, Any]], resource_manager: Any, metric: str) -> None:
        super().__init__(exps, resource_manager, metric)

    def next_batch(self, sample_size: int = 1) -> list[dict[str, Any]]:
        batch, self.all_exps = self.all_exps[:sample_size], self.all_exps[sample_size:]
        return batch
