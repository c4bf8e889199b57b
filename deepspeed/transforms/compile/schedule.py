"""Parsed pass schedules: which settings and passes apply from which step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.config.sections.model import CompileConfig
from deepspeed.transforms.compile.backend import BUILTIN_PASSES, GraphPass, opt_passes
from deepspeed.transforms.compile.passes import (
    offload_adam_states,
    prefetch,
    selective_gather,
    zero3_compile,
    zero_1_and_2_compile,
)
from deepspeed.transforms.compile.passes.contract import validate_schedule

WARMUP = 5
"""Number of steps after which the memory use of a step is known."""


@dataclass(frozen=True)
class Period:
    """From ``step`` to the next period: the names of the active built-in passes, and other passes in order."""

    step: int
    settings: frozenset[str]
    passes: tuple[GraphPass, ...]


def default_schedule(config: CompileConfig, stage: int) -> list[tuple[int, list[str]]]:
    moving = [offload_adam_states.NAME] if config.offload_opt_states else []
    if stage < 3:
        names = {1: [zero_1_and_2_compile.NAME], 2: [zero_1_and_2_compile.NAME_Z2]}.get(stage, [])
        return [(0, names + moving)]
    always = [zero3_compile.NAME, prefetch.NAME]
    if moving:
        return [(0, always + moving)]
    return [(0, always), (WARMUP, [*always, selective_gather.NAME])]


def read_schedule(schedule: Sequence[Any], stage: int) -> list[Period]:
    """Parse a user's schedule ``[(step, [pass, ...]), ...]``, each pass a known name or a function. ValueError: it is
    invalid."""
    if not isinstance(schedule, list):
        raise ValueError(f"schedule must be a list of (step, passes), not {schedule!r}")
    for entry in schedule:
        if not (isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[1], list)):
            raise ValueError(f"schedule: each entry must be (step, [passes]), not {entry!r}")
        if isinstance(entry[0], bool) or not isinstance(entry[0], int) or entry[0] < 0:
            raise ValueError(f"schedule: a step must be a number of updates >= 0, not {entry[0]!r}")
    steps = [step for step, _ in schedule]
    if steps != sorted(set(steps)):
        raise ValueError(f"schedule: steps must increase, got {steps}")
    periods = [_period(step, passes, stage) for step, passes in schedule]
    validate_schedule(schedule, [(function, name) for name, function in opt_passes.items()])
    return periods


def _period(step: int, passes: Sequence[str | GraphPass], stage: int) -> Period:
    ours = {each.function: name for name, each in BUILTIN_PASSES.items()}
    settings: list[str] = []
    others: list[GraphPass] = []
    for entry in passes:
        if isinstance(entry, str):
            if entry not in opt_passes:
                raise ValueError(
                    f"schedule, step {step}: unknown pass {entry!r}; the passes are {', '.join(sorted(opt_passes))}"
                )
            function = opt_passes[entry]
        elif callable(entry):
            function = entry
        else:
            raise ValueError(f"schedule, step {step}: a pass must be a name or a function, not {entry!r}")
        name = next((name for known, name in ours.items() if known is function), None)
        if name is None:
            others.append(function)
            continue
        if stage not in BUILTIN_PASSES[name].stages:
            wanted = " or ".join(map(str, BUILTIN_PASSES[name].stages))
            raise ValueError(
                f"schedule, step {step}: pass {name!r} needs zero_optimization.stage {wanted} (it is {stage})"
            )
        settings.append(name)
    return Period(step, frozenset(settings), tuple(others))
