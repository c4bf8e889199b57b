"""Checking a config without a model, a process group or a device: `deepspeed.check_config` and `ds_check`.

Config files of Accelerate and of the Trainer are read too (`client_config.py`).
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepspeed.client_config import ClientConfig, client_of, read_any, read_client
from deepspeed.config.analysis import BATCH_KEYS, Analysis, analyse
from deepspeed.config.axes import axes_of, least_ranks
from deepspeed.config.batch import Batch
from deepspeed.config.problems import DeepSpeedConfigError, Problem, Remedy, nearest, shown
from deepspeed.config.reader import ConfigSource, UnreadableConfig
from deepspeed.config.schema import TrainingConfig
from deepspeed.config_fix import CannotFix, corrected, start_text, unified, write_fixed
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import NO_LAUNCHER, world_size
from deepspeed.runtime.constants import VALID_LR_SCHEDULES
from deepspeed.runtime.optim.registry import check_optimizer
from deepspeed.tool_arguments import ArgumentParser, positive

STAGES = (
    "nothing is partitioned across the ranks",
    "optimizer state is partitioned across the ranks",
    "optimizer state and gradients are partitioned across the ranks",
    "optimizer state, gradients and parameters are partitioned across the ranks",
)


@dataclass(frozen=True)
class ConfigReport:
    """What was found in a config, and what a run would do with it."""

    source: str
    ranks: int
    ranks_from: str
    errors: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    auto_keys: list[str] = field(default_factory=list)
    """Keys that are "auto": Trainer or Accelerate fills them in, else each stands for its default."""
    batch: Batch | None = None
    """None when the batch sizes do not fit, or are left to Trainer or Accelerate."""
    config: TrainingConfig | None = None
    """The config with every default filled in; None when it could not be read."""
    client: str | None = None
    """"Accelerate" or "Trainer" when the file is one of theirs."""
    filled: dict[str, Any] = field(default_factory=dict)
    """Keys that were "auto", with the values that the client's file gives them."""

    @property
    def ok(self) -> bool:
        return not self.errors

    def raise_for_errors(self) -> None:
        """DeepSpeedConfigError with all errors, if there are any."""
        if self.errors:
            raise DeepSpeedConfigError.of(self.errors, self.source)

    def __str__(self) -> str:
        return "\n".join(report_lines(self, Style(False)))


def check_config(
    config: str | os.PathLike[str] | Mapping[str, Any], world_size: int | None = None
) -> ConfigReport:
    """Everything that is wrong or noteworthy about a config, for a job of `world_size` ranks.

    `config` is what `initialize` takes, or a file of Accelerate or TrainingArguments that holds or names such a
    config. Without `world_size` it is taken from Accelerate's file, else from the launcher's environment, else it is
    1. "auto" values are not errors. Nothing is raised: see `errors` and `raise_for_errors()` of the result.
    """
    ranks, origin = 1, "not known"
    try:
        ranks, origin = _ranks(world_size)
        source = read_any(config)
    except (UnreadableConfig, DeepSpeedConfigError) as error:
        return ConfigReport(str(config)[:200], ranks, origin, errors=[Problem("config", str(error))])
    client = read_client(source, ranks)
    if client is None:
        return _checked(source, ranks, origin)
    if client.ranks is not None and world_size is None:
        ranks, origin = client.ranks, f"from {client.client}'s file"
    return _checked_for(client, source, ranks, origin)


def _checked_for(client: ClientConfig, source: ConfigSource, ranks: int, origin: str) -> ConfigReport:
    """What the client refuses, then what we refuse, under the names used in the client's file."""
    if not client.source.data:
        return ConfigReport(source.name, ranks, origin, client.errors, client.warnings, client=client.client)
    report = _checked(client.source, ranks, origin)
    return replace(
        report,
        errors=client.errors + [client.renamed(problem) for problem in report.errors],
        warnings=client.warnings + report.warnings,
        client=client.client,
        filled=client.filled,
    )


def _checked(source: ConfigSource, ranks: int, origin: str) -> ConfigReport:
    if origin == NO_LAUNCHER:
        ranks = max(ranks, least_ranks(source.data))
    analysis = analyse(source, axes_of(source.data, ranks, origin), auto_is_open=True)
    errors = analysis.errors + list(_argument_problems(analysis, source))
    return ConfigReport(
        source.name,
        ranks,
        origin,
        errors,
        analysis.warnings,
        analysis.auto_keys,
        analysis.batch,
        analysis.config,
    )


def _ranks(count: int | None) -> tuple[int, str]:
    if count is None:
        return world_size()
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"world_size must be a whole number of at least 1, not {count!r}")
    return count, "as asked for"


def _argument_problems(analysis: Analysis, source: ConfigSource) -> Iterator[Problem]:
    """Arguments that the optimizer's or schedule's constructor would refuse, besides those already reported."""
    config = analysis.config
    told = {problem.key for problem in analysis.errors}
    if config is None:
        return
    optimizer, scheduler = config.optimizer, config.scheduler
    if optimizer is not None and optimizer.type is not None and "optimizer.type" not in told:
        for text in check_optimizer(optimizer.type, optimizer.params):
            match = re.match(r"optimizer(\.\w+)*", text)
            key = match.group() if match else "optimizer"
            if key not in told:
                yield _argument_problem(key, text.removeprefix(key).lstrip("= "), source)
    if scheduler is not None and scheduler.type is not None and "scheduler.type" not in told:
        for name, text in _scheduler_problems(scheduler.type, scheduler.params or {}):
            if (key := f"scheduler.params.{name}") not in told:
                yield _argument_problem(key, text, source)


def _argument_problem(key: str, text: str, source: ConfigSource) -> Problem:
    path = tuple(key.split("."))
    close = re.search(r"did you mean '?(\w+)'?\?", text)
    siblings = source.data.get(path[0], {}).get("params") or {}
    remedy = Remedy(rename=close.group(1)) if close and close.group(1) not in siblings else None
    return Problem(key, text, source.place(path), remedy, path)


def _scheduler_problems(name: str, params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    owner = lr_schedules if name in VALID_LR_SCHEDULES else torch.optim.lr_scheduler
    known = [
        argument for argument in inspect.signature(getattr(owner, name)).parameters if argument != "optimizer"
    ]
    for key in params:
        if key not in known:
            hint = nearest(key, known)
            meant = f"; did you mean '{hint}'?" if hint else ""
            yield (
                key,
                f"unknown argument of {name}{meant} (value: {shown(params[key])}). Known: {', '.join(known)}",
            )


# ------------------------------------------------------------------------------------------------- the report


class Style:
    """Bold and coloured text if the terminal supports it."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __call__(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.on else text

    def bold(self, text: str) -> str:
        return self(text, "1")

    def good(self, text: str) -> str:
        return self(text, "1;32")

    def bad(self, text: str) -> str:
        return self(text, "1;31")

    def odd(self, text: str) -> str:
        return self(text, "1;33")


def report_lines(report: ConfigReport, style: Style) -> Iterator[str]:
    whose = f" of {report.client}" if report.client else ""
    yield style.bold(report.source) + f"{whose}: {_count(report.ranks, 'rank')} ({report.ranks_from})"
    if report.config is not None:
        for label, text in summary(report):
            yield f"  {label:<11}{text}"
    if report.warnings:
        yield style.odd(_count(len(report.warnings), "warning"))
        yield from (f"  {warning}" for warning in report.warnings)
    if report.errors:
        yield style.bad(_count(len(report.errors), "error"))
        yield from (f"  {problem}" for problem in report.errors)
    else:
        yield style.good("no errors")


def summary(report: ConfigReport) -> Iterator[tuple[str, str]]:
    """What the config amounts to, as (label, text)."""
    config = report.config
    assert config is not None
    if report.batch is not None:
        yield "batch", str(report.batch)
    elif any(key in BATCH_KEYS for key in report.auto_keys):
        yield "batch", "left to Trainer or Accelerate"
    stage = int(config.zero_optimization.stage)
    yield "ZeRO", f"stage {stage}: {STAGES[stage]}"
    yield "precision", precision(config)
    yield "clipping", f"global norm {config.gradient_clipping:g}" if config.gradient_clipping else "none"
    yield "optimizer", _named(config.optimizer)
    yield "schedule", _named(config.scheduler)
    if report.filled:
        yield "filled in", ", ".join(f"{key}={shown(value)}" for key, value in report.filled.items())
    if report.auto_keys:
        yield (
            '"auto"',
            f"{', '.join(report.auto_keys)} (Trainer or Accelerate fills them in, else the defaults hold)",
        )


def precision(config: TrainingConfig) -> str:
    """The number formats of training in a few words."""
    if config.fp16.enabled:
        scale = (
            f"static loss scale {config.fp16.loss_scale:g}"
            if config.fp16.loss_scale
            else "dynamic loss scale"
        )
        masters = "fp16" if config.fp16.fp16_master_weights_and_grads else "fp32"
        return f"fp16, {scale}, {masters} master weights"
    if config.bf16.enabled:
        return f"bf16, {'bf16' if config.bf16.bf16_master_weights_and_grads else 'fp32'} master weights"
    if config.torch_autocast.enabled:
        dtype = config.torch_autocast.dtype or torch.bfloat16
        return f"weights as in the model, products in {str(dtype).removeprefix('torch.')} (torch.autocast)"
    if config.amp.enabled:
        return "mixed precision by torch.amp"
    return "as in the model (fp32 unless it says otherwise)"


def _named(section: Any) -> str:
    if section is None or section.type is None:
        return "passed to initialize, or none"
    arguments = ", ".join(f"{key}={value}" for key, value in (section.params or {}).items())
    return f"{section.type}({arguments})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# -------------------------------------------------------------------------------------------- corrections


def fix_file(path: str, world_size: int | None = None, *, output: str | None = None) -> ConfigReport:
    """Correct a config file where its meaning is clear, print the changes, and report what is left.

    Without `output` the file itself is overwritten, with a copy of the original next to it (`.bak`). Raises CannotFix.
    """
    if not os.path.isfile(path):
        raise CannotFix(f"{path[:200]} is not a file")
    try:
        source = read_any(path)
    except UnreadableConfig as error:
        raise CannotFix(f"{error}; fix this by hand") from None
    if client := client_of(source.data):
        raise CannotFix(f"{path} is a file of {client}: run this on the DeepSpeed config that it names")
    before = source.text or ""
    text, report = corrected(
        start_text(source, in_place=output is None),
        path,
        lambda attempt: _checked(attempt, *_ranks(world_size)),
    )
    print("\n".join(unified(before, text, path)) or "nothing to correct")
    if text != before or output is not None:
        write_fixed(path, text, output)
    return report


# -------------------------------------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="ds_check",
        description="Check a DeepSpeed config: every misspelt key, wrong value and impossible combination at once, "
        "and the resulting batch sizes. The exit code is 1 when there are errors.",
    )
    parser.add_argument(
        "config",
        help="JSON or HJSON file, urlsafe-base64 JSON text, a file of `accelerate config`, or TrainingArguments with "
        "a key deepspeed, as JSON or YAML",
    )
    parser.add_argument(
        "--gpus",
        "--ranks",
        type=positive,
        metavar="N",
        help="ranks of the job (default: the environment's, else 1)",
    )
    parser.add_argument(
        "--fix",
        action="store_true",
        help="correct what is unambiguous: misspelt keys, deprecated spellings, values of the wrong type. Shows the "
        "changes, and keeps the original file as CONFIG.bak",
    )
    parser.add_argument("--output", metavar="FILE", help="with --fix: write to FILE and leave CONFIG alone")
    parser.add_argument("--no-color", action="store_true", help="plain text also on a terminal")
    args = parser.parse_args(argv)
    if args.output is not None and not args.fix:
        parser.error("--output goes with --fix")
    report = check_config(args.config, args.gpus)
    if args.fix:
        try:
            report = fix_file(args.config, args.gpus, output=args.output)
        except CannotFix as error:
            print(f"ds_check --fix: {error}", file=sys.stderr)
            return 2
    colors = sys.stdout.isatty() and not args.no_color and "NO_COLOR" not in os.environ
    print("\n".join(report_lines(report, Style(colors))))
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
