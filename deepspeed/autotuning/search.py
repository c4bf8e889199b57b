"""Which config is worth a run, by a model of the step's time that is fitted to the runs so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from deepspeed.autotuning.tuner.cost_model import StepTime

PLATEAU = 0.03
"""A larger micro-batch that gains less than this share is not worth its memory, nor a run that promises no more."""

Config = tuple[int, int]
"""ZeRO stage and samples of a micro-batch."""


class Search:
    """Proposes configs until none promises more than the best that was measured.

    Args:
        metric: latency, throughput or flops.
    """

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.seconds: dict[Config, float] = {}
        """Per micro-batch; infinite for a run that failed."""
        self.reason = ""
        """Why there was no next one."""

    def measured(self, config: Config, seconds: float = math.inf) -> None:
        self.seconds[config] = seconds

    def next(self, stages: Sequence[int], sizes: Callable[[int, int], Sequence[int]]) -> Config | None:
        """The config that promises most, or a stage that was not measured yet and may do as well; None if there is
        nothing to gain. ``sizes``: those that can be run at a stage, up to a limit."""
        ran = {config: seconds for config, seconds in self.seconds.items() if seconds < math.inf}
        model = StepTime()
        model.fit([(*config, seconds) for config, seconds in ran.items()])
        limit = model.plateau(PLATEAU) if self.metric != "latency" else 1 << 40
        candidates = [
            (stage, size) for stage in stages for size in sizes(stage, limit) if self._is_open(stage, size)
        ]
        if not candidates:
            self.reason = "every config that fits was measured"
            return None

        def score(config: Config) -> float:
            """Samples per second, or steps per second; larger is better."""
            return (1 if self.metric == "latency" else config[1]) / model.seconds(*config)

        def rank(config: Config) -> tuple[float, int]:
            return round(score(config), 9), -config[0]

        reached = max(map(score, ran))
        best = max(candidates, key=rank)
        if score(best) > (1 + PLATEAU) * reached:
            return best
        tried = {stage for stage, _ in ran}
        others = [
            each for each in candidates if each[0] not in tried and score(each) > (1 - PLATEAU) * reached
        ]
        if others:
            return max(others, key=rank)
        self.reason = f"no other config promises {PLATEAU:.0%} more"
        return None

    def _is_open(self, stage: int, size: int) -> bool:
        """Neither measured, nor larger than one that failed there."""
        failed = (at == stage and size >= bad for (at, bad), s in self.seconds.items() if s == math.inf)
        return (stage, size) not in self.seconds and not any(failed)
