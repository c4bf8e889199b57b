"""Memory need of a point of the space, from the plans of the first run and the peaks of the first two."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.tools.autotuning.space import MEMORY_KEYS, SEQUENCE, Point, key_of
from deepspeed.tools.autotuning.step_model import PlannedPoint

SPARE = 0.9
"""Share of the free memory that a config may need; the rest is a reserve for unplanned allocations."""


@dataclass
class MemoryNeeds:
    """Memory needs of points. ``info``: the first run's plans and measurements; ``requested``: the config changes
    that it was asked to plan; ``limit``: the user's limit in bytes per rank."""

    info: dict[str, Any] = field(default_factory=dict)
    requested: Sequence[Mapping[str, Any]] = ()
    limit: int | None = None
    bytes_per_sample: float = 0.0
    """Bytes per sample, from the peaks of two runs."""
    unexplained_bytes: int = 0
    """Bytes that neither the plan nor the samples explain."""

    def __post_init__(self) -> None:
        self._plans = {_key(plan["changes"]): plan for plan in self.info.get("variants") or []}

    # Available memory ---------------------------------------------------------------------------------------

    def free(self) -> int | None:
        """Return a rank's free bytes where the model computes; None if unknown."""
        found = self.limit
        for plan in self.info.get("stages", {}).values():
            if "near" in plan and plan["free"][plan["near"]] is not None:
                share = self._of_rank(plan, "free")
                return share if found is None else min(found, share)
        return found

    # Needed memory ------------------------------------------------------------------------------------------

    def planned(self, point: Point) -> dict[str, Any] | None:
        """Return the plan of a point; if its choices were planned one by one, the base plan plus what each adds. None:
        it was not planned."""
        found = self._plans.get(_key(key_of(point)))
        if found is not None:
            return found
        combination = tuple(c for c in point.choices if any(key in MEMORY_KEYS for key, _ in c.changes))
        base = self._plans.get(_key(key_of(Point(point.stage, 1, 1, combination))))
        if base is None or "need" not in base:
            return base if base is not None else self._by_stage(point.stage)
        added = 0
        for choice in point.choices:
            plan = self._plans.get(_key(key_of(Point(point.stage, 1, 1, (*combination, choice)))))
            added += max(0, plan["need"] - base["need"]) if plan and "need" in plan else 0
        return {**base, "need": base["need"] + added}

    def _by_stage(self, stage: int) -> dict[str, Any] | None:
        plan = self.info.get("stages", {}).get(str(stage))
        if plan is None or "need" not in plan:
            return plan
        return {"need": self._of_rank(plan, "need"), "fits": plan["fits"]}

    def _of_rank(self, plan: Mapping[str, Any], what: str) -> int:
        """Return a rank's bytes where the model computes; ranks of a node share host memory."""
        sharing = self.info["ranks_per_node"] if plan["near"] == "host" else 1
        return plan[what][plan["near"]] // sharing

    def states(self, point: Point) -> int:
        """Return a rank's bytes of weights, gradients, optimizer state and buffers at the peak of a step."""
        plan = self.planned(point)
        return int(plan["need"]) if plan and "need" in plan else 0

    def per_sample(self, point: Point | None = None) -> float:
        """Return the bytes per sample of a micro-batch."""
        kept = self.info.get("activation_mem_per_gpu", 0) / max(1, self.info.get("micro_batch") or 1)
        each = max(kept, self.bytes_per_sample)
        if point is None:
            return each
        return each * point.kept / int(point.changes.get(SEQUENCE) or 1)

    def need(self, point: Point) -> float:
        return self.states(point) + self.unexplained_bytes + self.per_sample(point) * point.size

    def can_fit(self, point: Point) -> bool:
        """Tell whether the point fits according to its plan; True if it was not planned."""
        plan = self.planned(point)
        free = self.free()
        if plan is None:
            return True
        return bool(plan.get("fits")) and (free is None or self.need(point) <= free * SPARE)

    def most_that_fits(self, point: Point, most: int) -> int:
        """Return the largest micro-batch size in samples that fits, at most ``most``."""
        free, each = self.free(), self.per_sample(point)
        if free is None or not each:
            return most
        left = int(free * SPARE) - self.states(point) - self.unexplained_bytes
        return max(0, min(most, int(left // each)))

    # Fit to two runs ----------------------------------------------------------------------------------------

    def fit(self, peaks: Mapping[Point, int]) -> None:
        """Fit bytes per sample and the unexplained rest. ``peaks``: peak bytes of each run's process (on a host,
        including its memory without the model)."""
        found = sorted((point.size, peak, point) for point, peak in peaks.items() if peak)
        if not found:
            return
        (small, low, first), (large, high, _) = found[0], found[-1]
        if large > small:
            self.bytes_per_sample = max(0.0, (high - low) / (large - small))
        resident = self.info.get("resident", 0) if self.info.get("device_type") == "cpu" else 0
        explained = resident + self.states(first) + self.per_sample(first) * small
        self.unexplained_bytes = max(0, round(low - explained))

    def plan_of(self, point: Point) -> PlannedPoint:
        """Return the plan's figures for a point, for the step-time model."""
        plan = self.planned(point) or {}
        sent = float(plan.get("sent", 0.0))
        if point.stage >= 2:  # planned for one micro-batch: scale what each one sends
            sent *= (point.gas + 1) / 2 if point.stage == 2 else point.gas
        return PlannedPoint(sent, float(plan.get("owned", 0.0)), round(self.need(point)))


def _key(changes: Mapping[str, Any]) -> str:
    return json.dumps(changes, sort_keys=True)
