"""`ds_check`: report on a config file, or correct it; and `deepspeed.check_config`.

A check needs no model, process group or device. Config files of Accelerate and of the Trainer are accepted too
(`clients.py`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepspeed.base.tool_arguments import exit_quietly
from deepspeed.config import optimizers
from deepspeed.config.analysis import Analysis, analyse
from deepspeed.config.arguments import SCHEDULES
from deepspeed.config.axes import NO_LAUNCHER, axes_of, least_ranks, world_size
from deepspeed.config.optimizers import arguments_of, check_optimizer
from deepspeed.config.problems import FROM_DICT, DeepSpeedConfigError, Problem, Remedy, nearest, shown
from deepspeed.config.reader import ConfigSource, DuplicateKeys, UnreadableConfig
from deepspeed.tools import parsers
from deepspeed.tools.config.clients import ClientConfig, client_of, read_any, read_client
from deepspeed.tools.config.fix import CannotFix, corrected, start_text, unified, write_fixed
from deepspeed.tools.config.report import ConfigReport, Style, report_lines


def check_config(
    config: str | os.PathLike[str] | Mapping[str, Any], world_size: int | None = None
) -> ConfigReport:
    """Report all errors and notes about a config, for a job of `world_size` ranks.

    `config`: as for `initialize`, or a file of Accelerate or TrainingArguments that contains or names such a config.
    `world_size`: default: from Accelerate's file, else from the launcher's environment, else 1. "auto" values are not
    errors. Mistakes in the config are not raised: see `errors` and `raise_for_errors()` of the result.
    """
    ranks, origin = 1, "not known"
    twice: list[Problem] = []
    try:
        ranks, origin = _ranks(world_size)
        source = read_any(config)
    except DuplicateKeys as error:
        source, twice = error.source, [Problem("config", str(error))]
    except (UnreadableConfig, DeepSpeedConfigError) as error:
        name = FROM_DICT if isinstance(config, Mapping) else str(config)[:200]
        return ConfigReport(name, ranks, origin, errors=[Problem("config", str(error))])
    client = read_client(source, ranks)
    if client is None:
        report = _checked(source, ranks, origin)
    else:
        if client.ranks is not None and world_size is None:
            ranks, origin = client.ranks, f"from {client.client}'s file"
        report = _checked_for(client, source, ranks, origin)
    report.errors[:0] = twice
    return report


def check_source(source: ConfigSource, world_size: int | None = None) -> ConfigReport:
    """Check a DeepSpeed config that has been read."""
    return _checked(source, *_ranks(world_size))


def _checked_for(client: ClientConfig, source: ConfigSource, ranks: int, origin: str) -> ConfigReport:
    """Check first what the client refuses, then what we refuse, under the names used in the client's file."""
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
    analysis = analyse(source, axes_of(source.data, ranks, origin), allow_auto=True)
    errors = analysis.errors + list(_argument_problems(analysis, source))
    if source.not_json:
        analysis.warnings.insert(0, _only_hjson(source))
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


def _only_hjson(source: ConfigSource) -> str:
    return (
        f"{source.name} is not JSON ({source.not_json}): only DeepSpeed's reader accepts it, as HJSON; "
        "Transformers and Accelerate reject the file"
    )


def _ranks(count: int | None) -> tuple[int, str]:
    if count is None:
        return world_size()
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"world_size must be a whole number of at least 1, not {count!r}")
    return count, "as requested"


def _argument_problems(analysis: Analysis, source: ConfigSource) -> Iterator[Problem]:
    """Yield arguments that the constructor of the optimizer or schedule would refuse, and that are not reported yet."""
    config = analysis.config
    reported = {problem.key for problem in analysis.errors}
    if config is None:
        return
    optimizer, scheduler = config.optimizer, config.scheduler
    if optimizer is not None and optimizer.type is not None and "optimizer.type" not in reported:
        for text in check_optimizer(optimizer.type, optimizer.params):
            match = re.match(r"optimizer(\.\w+)*", text)
            key = match.group() if match else "optimizer"
            if key not in reported:
                yield _argument_problem(key, text.removeprefix(key).lstrip("= "), source)
    if scheduler is not None and scheduler.type is not None and "scheduler.type" not in reported:
        for name, text in _scheduler_problems(scheduler.type, scheduler.params or {}):
            if (key := f"scheduler.params.{name}") not in reported:
                yield _argument_problem(key, text, source)


def _argument_problem(key: str, text: str, source: ConfigSource) -> Problem:
    path = tuple(key.split("."))
    close = re.search(r"did you mean '?(\w+)'?\?", text)
    siblings = source.data.get(path[0], {}).get("params") or {}
    remedy = Remedy(rename=close.group(1)) if close and close.group(1) not in siblings else None
    return Problem(key, text, source.place(path), remedy, path)


def _scheduler_problems(name: str, params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    known = (
        dict.fromkeys(SCHEDULES[name], False)
        if name in SCHEDULES
        else arguments_of(optimizers.SCHEDULES, name)
    )
    known.pop("optimizer", None)
    hints = {key: nearest(key, list(known)) for key in params if key not in known}
    for key, hint in hints.items():
        meant = f"; did you mean '{hint}'?" if hint else ""
        text = f"unknown argument of {name}{meant} (value: {shown(params[key])}). Known: {', '.join(known)}"
        yield key, text
    for key, needed in known.items():
        if needed and key not in params and key not in hints.values():
            yield key, f"is missing: {name} needs it"


def fix_file(path: str, world_size: int | None = None, *, output: str | None = None) -> ConfigReport:
    """Correct a config file where its meaning is clear, print the changes, and report the remaining problems.

    Without `output` the file itself is overwritten, with a copy of the original next to it (`.bak`). Raises CannotFix.
    """
    if not os.path.isfile(path):
        raise CannotFix(f"{path[:200]} is not a file")
    try:
        source = read_any(path)
    except UnreadableConfig as error:
        raise CannotFix(f"{error}; fix this by hand") from None
    if client := client_of(source.data):
        raise CannotFix(f"{path} is a file of {client}: run this on the DeepSpeed config that it uses")
    before = source.text or ""
    text, report = corrected(
        start_text(source, in_place=output is None), path, lambda attempt: check_source(attempt, world_size)
    )
    print("\n".join(unified(before, text, path)) or "nothing to correct")
    if text != before or output is not None:
        write_fixed(path, text, output)
    return report


@exit_quietly("ds_check", OSError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = parsers.check()
    args = parser.parse_args(argv)
    if args.output is not None and not args.fix:
        parser.error("--output needs --fix")
    if args.fix:
        report = fix_file(args.config, args.gpus, output=args.output)
    else:
        report = check_config(args.config, args.gpus)
    colors = sys.stdout.isatty() and not args.no_color and "NO_COLOR" not in os.environ
    print("\n".join(report_lines(report, Style(colors))))
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
