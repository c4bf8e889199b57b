"""Choice of the next config to run, by a model of the step time that is fitted to the runs so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from deepspeed.tools.autotuning.space import COMMUNICATION, COMPUTE, Point, SpaceChoice
from deepspeed.tools.autotuning.step_model import Parts, PlannedPoint, StepModel, parts_of

PLATEAU = 0.03
"""A larger micro-batch that gains less than this share is not worth its memory, nor a run that promises no more."""
NEARLY = PLATEAU / 2
"""Points that promise as much within this share are told apart by what it costs to run them."""
OF_COMPUTE = 0.5
"""The most of the computing that other numbers of threads are taken to save."""


class Search:
    """Proposes points of the space until none promises more than the best that was measured.

    Args:
        metric: latency, throughput or flops.
        planned: What the memory plan says about a point.
        ranks: All of them.
    """

    def __init__(
        self, metric: str, planned: Callable[[Point], PlannedPoint] = lambda _: PlannedPoint(), ranks: int = 1
    ) -> None:
        self.metric = metric
        self.planned = planned
        self.ranks = ranks
        self.apart = False
        self.runs: dict[Point, tuple[float, Mapping[str, float] | None]] = {}
        """Seconds of a step, and its breakdown; infinite for a run that failed."""
        self.reason = ""
        """Why there was no next one."""
        self.left: list[str] = []
        """What was not run, and why."""

    def measured(
        self, point: Point, seconds: float = math.inf, breakdown: Mapping[str, float] | None = None
    ) -> None:
        self.runs[point] = seconds, breakdown

    def model(self) -> StepModel:
        """Fitted to what ended well."""
        model = StepModel(self.planned, self.apart)
        model.fit([(point, *run) for point, run in self.runs.items() if run[0] < math.inf])
        return model

    def parts(self, point: Point) -> Parts:
        """Return the parts of a measured step."""
        return parts_of(*self.runs[point])

    def best(self) -> Point:
        """Return the measured point that is best by the metric."""
        ended = [point for point, (seconds, _) in self.runs.items() if seconds < math.inf]
        return max(ended, key=lambda point: self.score(point, self.runs[point][0]))

    def score(self, point: Point, seconds: float) -> float:
        """Samples per second, or steps per second; larger is better."""
        samples = point.size * point.gas * self.ranks / point.parts()
        return (1 if self.metric == "latency" else samples) / seconds

    def limit(self, model: StepModel) -> int:
        """Samples of a micro-batch beyond which there is nothing to gain."""
        if self.metric == "latency":
            return 1 << 40
        best = self.best()
        return model.plateau(PLATEAU, best.gas, self.parts(best))

    def next(
        self,
        points: Callable[[int], Iterable[Point]],
        fines: Callable[[int], Iterable[SpaceChoice]] = lambda _: (),
    ) -> Point | None:
        """The point that promises most, or a stage or choice that was not measured yet and may do as well; None if
        there is nothing to gain.

        ``points``: those that can be run, with micro-batches up to a limit. ``fines``: the choices of a stage that are
        tried one at a time.
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
            """Return, of the points that are nearly the best, the one with the shortest steps."""
            top = score(max(among, key=rank))
            near = [point for point in among if score(point) >= (1 - NEARLY) * top]
            return min(near, key=lambda point: (round(model.seconds(point), 9), *(-x for x in rank(point))))

        if candidates and score(max(candidates, key=rank)) > (1 + PLATEAU) * reached:
            return cheapest(candidates)
        fine = self._next_fine(best, fines(best.stage))
        if fine is not None and self.may_save(best, fine.choices[-1]) >= 2 * PLATEAU:
            return fine
        if candidates:
            tried = {point.stage for point in self.runs}
            others = [p for p in candidates if p.stage not in tried and score(p) > (1 - PLATEAU) * reached]
            if others:
                return cheapest(others)
        if fine is not None:
            return fine
        self.left = [
            f"{point.name()}: {score(point) / reached - 1:+.0%} expected"
            for point in _firsts(candidates, rank)
        ]
        self.reason = (
            f"no other config promises {PLATEAU:.0%} more"
            if candidates
            else "every config that fits was measured"
        )
        return None

    def _next_fine(self, best: Point, fines: Iterable[SpaceChoice]) -> Point | None:
        """The choice that may save most of the best point's step, if that is worth a run."""
        open_ = [choice for choice in fines if self._is_open(best.with_choice(choice))]
        open_ = [choice for choice in open_ if best.with_choice(choice) != best]
        may = {choice: self.may_save(best, choice) for choice in open_}
        worth = [choice for choice in open_ if may[choice] >= PLATEAU]
        return best.with_choice(max(worth, key=lambda choice: may[choice])) if worth else None

    def may_save(self, point: Point, choice: SpaceChoice) -> float:
        """The share of a measured point's step that a choice can save at most."""
        parts = self.parts(point)
        if choice.saves == COMMUNICATION:
            return parts.exposed / parts.total
        return OF_COMPUTE * parts.compute / parts.total if choice.saves == COMPUTE else 1.0

    def _is_open(self, point: Point) -> bool:
        """Neither measured, nor larger than one that failed with the same choices."""
        failed = (
            bad.stage == point.stage and bad.choices == point.choices and point.size >= bad.size
            for bad, (seconds, _) in self.runs.items()
            if seconds == math.inf
        )
        return point not in self.runs and not any(failed)


def _firsts(
    candidates: Sequence[Point], rank: Callable[[Point], tuple[float, int, int]], most: int = 3
) -> list[Point]:
    """The best of each stage."""
    found = [
        max((p for p in candidates if p.stage == stage), key=rank) for stage in {p.stage for p in candidates}
    ]
    return sorted(found, key=rank, reverse=True)[:most]
