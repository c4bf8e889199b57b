"""Schedules of a curriculum's difficulty (pacing functions of Li, Zhang and He 2022, appendix)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.data import NEEDED, wrong_curriculum

FIXED_LINEAR, FIXED_ROOT, FIXED_DISCRETE, CUSTOM = "fixed_linear", "fixed_root", "fixed_discrete", "custom"


class CurriculumScheduler:
    """The difficulty of one metric as a function of the training step.

    Args:
        config: ``min_difficulty``, ``max_difficulty``, ``schedule_type`` and ``schedule_config`` as in the sections
            ``curriculum_learning`` and ``data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.<name>``.

    At step t the difficulty is

    - ``fixed_root``: min + (max - min) (t / total_curriculum_step)^(1 / root_degree), rounded down to a multiple of
      ``difficulty_step``, at least min (rounded up to a multiple) and at most max;
    - ``fixed_linear``: the same with a degree of 1;
    - ``fixed_discrete``: ``difficulty[i]`` for the first i with t <= ``max_step[i]``, the last one after all of them;
    - ``custom``: the result of the function passed to :meth:`set_custom_get_difficulty`.

    Raises:
        DeepSpeedConfigError: a key is missing, or ``schedule_type`` is unknown.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if config.get(key) is None:
                raise DeepSpeedConfigError(f"a curriculum needs {key!r}")
        kind = config["schedule_type"]
        if kind not in NEEDED:
            raise DeepSpeedConfigError(f"schedule_type={kind!r} is unknown: use one of {', '.join(NEEDED)}")
        self.state: dict[str, Any] = {
            "min_difficulty": config["min_difficulty"],
            "max_difficulty": config["max_difficulty"],
            "current_difficulty": config["min_difficulty"],
            "schedule_type": kind,
        }
        self.custom_get_difficulty: Callable[[int], int] | None = None
        if kind != CUSTOM:
            details = {k: v for k, v in (config.get("schedule_config") or {}).items() if v is not None}
            self.state["schedule_config"] = details
            if wrong := wrong_curriculum(kind, details):
                raise DeepSpeedConfigError(wrong)

    def get_current_difficulty(self) -> int:
        return self.state["current_difficulty"]

    def set_current_difficulty(self, difficulty: int) -> None:
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Set the function of ``schedule_type`` custom: ``schedule_function(step)`` returns the difficulty at a
        step."""
        self.custom_get_difficulty = schedule_function

    @property
    def lacks_function(self) -> bool:
        """Return whether the schedule is custom and its function is not set."""
        return self.state["schedule_type"] == CUSTOM and self.custom_get_difficulty is None

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state

    def get_difficulty(self, global_steps: int) -> int:
        """Return the difficulty at a step. RuntimeError: the schedule is custom and its function is not set."""
        kind, state = self.state["schedule_type"], self.state
        if kind == CUSTOM:
            if self.custom_get_difficulty is None:
                raise RuntimeError(
                    "a curriculum with schedule_type='custom' needs its function before the first batch: call "
                    "engine.set_custom_curriculum_learning_schedule({metric: function}), or, for the section "
                    "curriculum_learning, engine.curriculum_scheduler_legacy.set_custom_get_difficulty(function)"
                )
            return self.custom_get_difficulty(global_steps)
        details = state["schedule_config"]
        if kind == FIXED_DISCRETE:
            return next(
                (
                    level
                    for level, last in zip(details["difficulty"], details["max_step"], strict=False)
                    if global_steps <= last
                ),
                details["difficulty"][-1],
            )
        degree = details["root_degree"] if kind == FIXED_ROOT else 1
        lowest, highest = state["min_difficulty"], state["max_difficulty"]
        share = (float(global_steps) / details["total_curriculum_step"]) ** (1.0 / degree)
        reached, unit = math.floor(share * (highest - lowest) + lowest), details["difficulty_step"]
        first = -(-lowest // unit) * unit  # the first multiple that is at least the minimum
        return min(max(reached - reached % unit, first), highest)

    def update_difficulty(self, global_steps: int) -> int:
        """Advance to a step and return its difficulty, which stays at the maximum once reached."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]
