"""The search space: its points, and the choices besides stage and batch sizes.

Choices of *memory* change the memory need: all their combinations are planned. Choices of *speed* do not:
they are tried one at a time, from the best point so far, if the part of the step that they can save is worth it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.planning.variants import EXPERTS, SEQUENCE, STAGES, TENSOR

OFFLOAD = "zero_optimization.offload_optimizer"
BUDGET = "activation_checkpointing.memory_budget"
BUCKET = "zero_optimization.reduce_bucket_size"
PREFETCH = "zero_optimization.stage3_prefetch_bucket_size"
DEFAULTS = {BUCKET: 500_000_000, PREFETCH: 50_000_000}
"""Default sizes, in elements."""
THREADS = "OMP_NUM_THREADS"
PARALLEL = (TENSOR, SEQUENCE, STAGES, EXPERTS)
"""Parallelism degrees. They are tuned only if `tuning_space` lists them: the model or the script must support them."""
MEMORY_KEYS = (*PARALLEL, BUDGET, f"{OFFLOAD}.device", f"{OFFLOAD}.ratio")

COMMUNICATION, COMPUTE, ANYTHING = "exposed communication", "compute", "anything"


@dataclass(frozen=True)
class SpaceChoice:
    """Values of keys that are chosen together; empty: the config unchanged. ``saves``: the part of a step whose time
    they may reduce."""

    changes: tuple[tuple[str, Any], ...] = ()
    saves: str = ANYTHING

    def name(self) -> str:
        words = [f"{key.rpartition('.')[2].replace('_', '')}{_plain(value)}" for key, value in self.changes]
        return "_".join(words)

    def text(self) -> str:
        return ", ".join(f"{key}: {value}" for key, value in self.changes)


def _plain(value: Any) -> str:
    return re.sub(r"[^\w.]", "", f"{value:g}" if isinstance(value, float) else str(value))


def changes_of(choices: Iterable[SpaceChoice]) -> dict[str, Any]:
    """Return the combined changes of the choices."""
    return {key: value for choice in choices for key, value in choice.changes}


@dataclass(frozen=True)
class Point:
    """A config to try: ZeRO stage, micro-batch size in samples, accumulation steps, and choices."""

    stage: int
    size: int
    gas: int = 1
    choices: tuple[SpaceChoice, ...] = ()

    @property
    def changes(self) -> dict[str, Any]:
        return changes_of(self.choices)

    @property
    def kept(self) -> float:
        """Share of its activations that a micro-batch keeps for backward under a memory budget; 1 without one."""
        share = self.changes.get(BUDGET)
        return share if isinstance(share, (int, float)) and 0 < share <= 1 else 1.0

    def with_choice(self, choice: SpaceChoice) -> Point:
        keys = {key for key, _ in choice.changes}
        kept = tuple(each for each in self.choices if not keys & {key for key, _ in each.changes})
        return replace(self, choices=(*kept, choice))

    def name(self) -> str:
        words = [f"z{self.stage}", f"gas{self.gas}", f"tmbspg{self.size}", *(c.name() for c in self.choices)]
        return "_".join(words)

    def model_ranks(self) -> int:
        """Return the number of ranks that work on the same samples."""
        found = self.changes
        return math.prod(int(found.get(key) or 1) for key in (TENSOR, SEQUENCE, STAGES))


@dataclass(frozen=True)
class SpaceChoices:
    """Alternatives by group; the first of each group is the config unchanged."""

    memory: tuple[tuple[SpaceChoice, ...], ...] = ()
    speed: tuple[tuple[SpaceChoice, ...], ...] = ()

    def memory_combinations(self, stage: int) -> Iterator[tuple[SpaceChoice, ...]]:
        """Yield every combination of the choices of memory at this stage."""
        for chosen in itertools.product(*self.memory):
            if _allowed(stage, changes_of(chosen)):
                yield tuple(choice for choice in chosen if choice.changes)

    def speed_choices(self, stage: int) -> Iterator[SpaceChoice]:
        for group in self.speed:
            for choice in group:
                if choice.changes and _allowed(stage, dict(choice.changes)):
                    yield choice

    def all_combinations(self, stage: int) -> Iterator[tuple[SpaceChoice, ...]]:
        """Yield every combination of all choices at this stage."""
        for memory in self.memory_combinations(stage):
            for chosen in itertools.product(*self.speed):
                if _allowed(stage, changes_of(chosen)):
                    yield (*memory, *(choice for choice in chosen if choice.changes))

    def to_plan(self, stages: Iterable[int]) -> list[dict[str, Any]]:
        """Return the variants that the first run plans: every combination of the choices of memory, alone and with each
        of the other choices."""
        found: list[dict[str, Any]] = []
        for stage in stages:
            for memory in self.memory_combinations(stage):
                for speed in (SpaceChoice(), *self.speed_choices(stage)):
                    found.append(key_of(Point(stage, 1, 1, (*memory, speed))))
        return found


def _allowed(stage: int, changes: Mapping[str, Any]) -> bool:
    if any(key.startswith(OFFLOAD) for key in changes) and stage == 0:
        return False
    return not (PREFETCH in changes and stage < 3)


def key_of(point: Point) -> dict[str, Any]:
    """Return the part of a point that the memory plan depends on."""
    changes = {key: value for key, value in point.changes.items() if not key.isupper()}
    return {"zero_optimization.stage": point.stage, **changes}


def choices_of(
    config: Mapping[str, Any], tuning_space: Mapping[str, Sequence[Any]], *, fast: bool
) -> SpaceChoices:
    """Collect the choices. ``tuning_space``: values that the user lists, by key. Without ``fast``, add the built-in
    choices for keys that the config leaves open."""
    memory: list[tuple[SpaceChoice, ...]] = []
    speed: list[tuple[SpaceChoice, ...]] = []
    for key, values in tuning_space.items():
        group = tuple(SpaceChoice(((key, value),), _saves(key)) for value in values)
        (memory if key in MEMORY_KEYS else speed).append(
            group if key in MEMORY_KEYS else (SpaceChoice(), *group)
        )
    for key, values in BUILT_IN.items() if not fast else ():
        if value_at(config, key) is None and not any(given.startswith(key) for given in tuning_space):
            group = (SpaceChoice(), *(SpaceChoice(changes, _saves(key)) for changes in values))
            (memory if key in (OFFLOAD, BUDGET) else speed).append(group)
    return SpaceChoices(tuple(memory), tuple(speed))


BUILT_IN: dict[str, tuple[tuple[tuple[str, Any], ...], ...]] = {
    OFFLOAD: tuple(((f"{OFFLOAD}.device", "cpu"), (f"{OFFLOAD}.ratio", ratio)) for ratio in (0.5, 1.0)),
    BUDGET: (((BUDGET, 0.5),), ((BUDGET, 0.2),)),
    BUCKET: (((BUCKET, 50_000_000),), ((BUCKET, 5_000_000),)),
    PREFETCH: (((PREFETCH, 5_000_000),), ((PREFETCH, 200_000_000),)),
}
"""By key that the config may leave open: the changes to try."""


def _saves(key: str) -> str:
    if key == THREADS:
        return COMPUTE
    return COMMUNICATION if "bucket" in key or "overlap" in key else ANYTHING


def threads_to_try(cores: int, ranks: int) -> tuple[SpaceChoice, ...]:
    """Return the thread counts to try: the launcher's, a rank's share of the cores, and half of it, in case logical
    CPUs share physical cores."""
    share = cores // max(1, ranks)
    halves = (share // 2,) if share >= 2 else ()
    return (SpaceChoice(), *(SpaceChoice(((THREADS, count),), COMPUTE) for count in halves))


def without_memory_choices(choices: SpaceChoices, keys: Iterable[str]) -> SpaceChoices:
    """Drop the groups of these keys: they make no difference on this machine or to this model."""
    gone = tuple(keys)
    kept = tuple(
        group
        for group in choices.memory
        if not any(key.startswith(gone) for choice in group for key, _ in choice.changes)
    )
    return replace(choices, memory=kept)


def without_ineffective_sizes(choices: SpaceChoices, numel: int, given: Iterable[str]) -> SpaceChoices:
    """Drop sizes that, like the default, hold all ``numel`` elements of the model; keep those of keys that the user has
    ``given`` values for."""
    listed = set(given)

    def differs(choice: SpaceChoice) -> bool:
        sizes = [(value, DEFAULTS[key]) for key, value in choice.changes if key in DEFAULTS.keys() - listed]
        return all(min(value, numel) != min(default, numel) for value, default in sizes)

    speed = tuple(tuple(choice for choice in group if differs(choice)) for group in choices.speed)
    return replace(choices, speed=speed)


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if it is missing."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
