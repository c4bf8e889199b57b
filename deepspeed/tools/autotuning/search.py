"""Choice of the next config to run, by a step-time model that is fitted to the runs so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from deepspeed.tools.autotuning.space import COMMUNICATION, COMPUTE, Point, SpaceChoice
from deepspeed.tools.autotuning.step_model import PlannedPoint, StepBreakdown, StepModel, step_breakdown

PLATEAU = 0.03
"""Minimum relative gain: below it, a larger micro-batch is not worth its memory, nor another point its run."""
NEARLY = PLATEAU / 2
"""Points whose predicted scores differ by less than this share are ranked by the cost of running them."""
MAX_COMPUTE_SAVING = 0.5
"""Assumed upper bound on the share of the compute time that another number of threads saves."""


class Search:
    """Proposes points of the space until none promises to improve on the best measured one.

    Args:
        metric: latency, throughput or flops.
        planned: Returns the memory plan's figures for a point.
        ranks: World size.
    """

    def __init__(
        self, metric: str, planned: Callable[[Point], PlannedPoint] = lambda _: PlannedPoint(), ranks: int = 1
    ) -> None:
        self.metric = metric
        self.planned = planned
        self.ranks = ranks
        self.has_device_memory = False
        self.runs: dict[Point, tuple[float, Mapping[str, float] | None]] = {}
        """By point: seconds per step (infinite for a failed run), and its breakdown."""
        self.reason = ""
        """Reason why the search ended."""
        self.not_run: list[str] = []
        """Points that were not run, with their expected gains."""

    def record(
        self, point: Point, seconds: float = math.inf, breakdown: Mapping[str, float] | None = None
    ) -> None:
        self.runs[point] = seconds, breakdown

    def model(self) -> StepModel:
        """Return a step-time model fitted to the successful runs."""
        model = StepModel(self.planned, self.has_device_memory)
        model.fit([(point, *run) for point, run in self.runs.items() if run[0] < math.inf])
        return model

    def breakdown(self, point: Point) -> StepBreakdown:
        """Return the parts of a measured point's step."""
        return step_breakdown(*self.runs[point])

    def best(self) -> Point:
        """Return the measured point that is best by the metric."""
        ended = [point for point, (seconds, _) in self.runs.items() if seconds < math.inf]
        return max(ended, key=lambda point: self.score(point, self.runs[point][0]))

    def score(self, point: Point, seconds: float) -> float:
        """Return samples per second, or steps per second for latency; larger is better."""
        samples = point.size * point.gas * self.ranks / point.model_ranks()
        return (1 if self.metric == "latency" else samples) / seconds

    def limit(self, model: StepModel) -> int:
        """Return the micro-batch size in samples above which nothing is gained."""
        if self.metric == "latency":
            return 1 << 40
        best = self.best()
        return model.plateau(PLATEAU, best.gas, self.breakdown(best))

    def next(
        self,
        points: Callable[[int], Iterable[Point]],
        speed_choices: Callable[[int], Iterable[SpaceChoice]] = lambda _: (),
    ) -> Point | None:
        """Return the most promising point, or an untried stage or choice that may do as well; None if there is nothing
        to gain.

        ``points``: the runnable points, with micro-batches up to a limit. ``speed_choices``: the choices of a stage
        that are tried one at a time.
        """
        model = self.model()
        candidates = [point for point in points(self.limit(model)) if self._is_open(point)]
        best = self.best()
        reached = self.score(best, self.runs[best][0])

        def score(point: Point) -> float:
            return self.score(point, model.seconds(point))

        def rank(point: Point) -> tuple[float, int, int]:
            return round(score(point), 9), -len(point.choices), -point.stage

        def cheapest(among: Sequence[Point]) -> Point:
            """Return the point with the shortest steps among those within ``NEARLY`` of the best."""
            top = score(max(among, key=rank))
            near = [point for point in among if score(point) >= (1 - NEARLY) * top]
            return min(near, key=lambda point: (round(model.seconds(point), 9), *(-x for x in rank(point))))

        if candidates and score(max(candidates, key=rank)) > (1 + PLATEAU) * reached:
            return cheapest(candidates)
        faster = self._next_speed_choice(best, speed_choices(best.stage))
        if faster is not None and self.may_save(best, faster.choices[-1]) >= 2 * PLATEAU:
            return faster
        if candidates:
            tried = {point.stage for point in self.runs}
            others = [p for p in candidates if p.stage not in tried and score(p) > (1 - PLATEAU) * reached]
            if others:
                return cheapest(others)
        if faster is not None:
            return faster
        self.not_run = [
            f"{point.name()}: {score(point) / reached - 1:+.0%} expected"
            for point in _best_by_stage(candidates, rank)
        ]
        self.reason = (
            f"no other config is expected to gain {PLATEAU:.0%}"
            if candidates
            else "every config that fits was measured"
        )
        return None

    def _next_speed_choice(self, best: Point, speed_choices: Iterable[SpaceChoice]) -> Point | None:
        """Return the best point with the untried choice that may save most, if that is worth a run; else None."""
        open_ = [choice for choice in speed_choices if self._is_open(best.with_choice(choice))]
        open_ = [choice for choice in open_ if best.with_choice(choice) != best]
        may = {choice: self.may_save(best, choice) for choice in open_}
        worth = [choice for choice in open_ if may[choice] >= PLATEAU]
        return best.with_choice(max(worth, key=lambda choice: may[choice])) if worth else None

    def may_save(self, point: Point, choice: SpaceChoice) -> float:
        """Return the largest share of a measured point's step time that a choice can save."""
        parts = self.breakdown(point)
        if choice.saves == COMMUNICATION:
            return parts.exposed / parts.total
        return MAX_COMPUTE_SAVING * parts.compute / parts.total if choice.saves == COMPUTE else 1.0

    def _is_open(self, point: Point) -> bool:
        """Tell whether the point is neither measured, nor at least as large as a failed one of the same stage and
        choices."""
        failed = (
            bad.stage == point.stage and bad.choices == point.choices and point.size >= bad.size
            for bad, (seconds, _) in self.runs.items()
            if seconds == math.inf
        )
        return point not in self.runs and not any(failed)


def _best_by_stage(
    candidates: Sequence[Point], rank: Callable[[Point], tuple[float, int, int]]
) -> list[Point]:
    """Return the best candidate of each stage, best first, at most three."""
    found = [
        max((p for p in candidates if p.stage == stage), key=rank) for stage in {p.stage for p in candidates}
    ]
    return sorted(found, key=rank, reverse=True)[:3]
