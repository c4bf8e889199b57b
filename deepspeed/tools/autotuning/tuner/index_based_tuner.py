"""Tuners that do not learn: in order, or at random."""

from __future__ import annotations

import random
from typing import Any

from deepspeed.tools.autotuning.tuner.base_tuner import BaseTuner


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
