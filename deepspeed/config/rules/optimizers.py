"""Rules about optimizers, schedules and their arguments."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.config.arguments import (
    REQUIRED,
    WrongArgument,
    meant,
    remedy,
    wrong_optimizer_arguments,
    wrong_schedule_arguments,
)
from deepspeed.config.constants import VALID_LR_SCHEDULES
from deepspeed.config.optimizers import BUILT_IN
from deepspeed.config.problems import nearest, shown
from deepspeed.config.rules.findings import STAGE, Finding
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.torch_classes import OPTIMIZERS, SCHEDULES, classes_of


def optimizer_is_known(config: TrainingConfig) -> Iterator[Finding]:
    section = config.optimizer
    if section is None:
        return
    if "max_grad_norm" in (section.params or {}):
        yield Finding(
            ("optimizer.params.max_grad_norm",),
            "is not an argument of the optimizer: set gradient_clipping at top level instead",
        )
    name = section.type
    if name is None:
        if section.params:
            yield Finding(
                ("optimizer.type",), "is missing although optimizer.params is given: name the optimizer"
            )
        return
    if name.lower() not in BUILT_IN and name not in classes_of(OPTIMIZERS):
        yield Finding(("optimizer.type",), _unknown_class(name, tuple(BUILT_IN), OPTIMIZERS))


def one_bit_needs_copies(config: TrainingConfig) -> Iterator[Finding]:
    zero, section = config.zero_optimization, config.optimizer
    built_in = None if section is None else BUILT_IN.get((section.type or "").lower())
    if section is None or zero.stage == 0 or built_in is None or not built_in.exchanges:
        return
    if zero.stage == 3:
        yield Finding(
            ("optimizer.type", STAGE),
            f"{section.type!r} exchanges momenta instead of gradients, of which stage {zero.stage} has only parts; use "
            "stage 0 to 2, or another optimizer with zero_quantized_gradients",
        )
    elif zero.mics_shard_size <= 0:
        yield Finding(
            ("optimizer.type", STAGE),
            f"{section.type!r} exchanges signs between copies of the weights, and stage {zero.stage} keeps one copy; "
            "set zero_optimization.mics_shard_size to the number of ranks per host, or use stage 0",
        )


def scheduler_is_known(config: TrainingConfig) -> Iterator[Finding]:
    section = config.scheduler
    if section is None:
        return
    name, params = section.type, section.params or {}
    if name is None:
        if params:
            yield Finding(
                ("scheduler.type",), "is missing although scheduler.params is given: name the schedule"
            )
        return
    if name not in VALID_LR_SCHEDULES and name not in classes_of(SCHEDULES):
        yield Finding(("scheduler.type",), _unknown_class(name, VALID_LR_SCHEDULES, SCHEDULES))
    for key in REQUIRED.get(name, ()):
        if key not in params:
            yield Finding((f"scheduler.params.{key}",), f"is missing: {name} needs it")


def arguments_make_sense(config: TrainingConfig) -> Iterator[Finding]:
    optimizer, scheduler = config.optimizer, config.scheduler
    wrong: list[tuple[str, Iterator[WrongArgument]]] = []
    if optimizer is not None:
        wrong.append(("optimizer", wrong_optimizer_arguments(optimizer.params)))
    if scheduler is not None and scheduler.type is not None:
        wrong.append(("scheduler", wrong_schedule_arguments(scheduler.type, scheduler.params)))
    for section, problems in wrong:
        for key, value, text, fits in problems:
            message = f"{shown(value)} is not allowed; expected {text}{remedy(value)}"
            yield Finding((f"{section}.params.{key}",), message, remedy=meant(value, fits))


def _unknown_class(name: str, own: tuple[str, ...], module: str) -> str:
    hint = nearest(name, [*own, *sorted(classes_of(module))])
    meant = f"; did you mean '{hint}'?" if hint else "."
    known = f"Built in: {', '.join(own)}; or the name of a class in {module}"
    return f"{shown(name)} is not known{meant} {known}"
