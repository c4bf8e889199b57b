"""Checking a config without a model, a process group or a device: `deepspeed.check_config`.

Config files of Accelerate and of the Trainer are read too (`clients.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from deepspeed.config import optimizers
from deepspeed.config.analysis import Analysis, analyse
from deepspeed.config.arguments import SCHEDULES
from deepspeed.config.axes import NO_LAUNCHER, axes_of, least_ranks, world_size
from deepspeed.config.optimizers import arguments_of, check_optimizer
from deepspeed.config.problems import FROM_DICT, DeepSpeedConfigError, Problem, Remedy, nearest, shown
from deepspeed.config.reader import ConfigSource, DuplicateKeys, UnreadableConfig
from deepspeed.tools.config.clients import ClientConfig, read_any, read_client
from deepspeed.tools.config.report import ConfigReport


def check_config(
    config: str | os.PathLike[str] | Mapping[str, Any], world_size: int | None = None
) -> ConfigReport:
    """Everything that is wrong or noteworthy about a config, for a job of `world_size` ranks.

    `config` is what `initialize` takes, or a file of Accelerate or TrainingArguments that holds or names such a
    config. Without `world_size` it is taken from Accelerate's file, else from the launcher's environment, else it is
    1. "auto" values are not errors. Nothing is raised: see `errors` and `raise_for_errors()` of the result.
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
    """Check what the client refuses, then what we refuse, under the names used in the client's file."""
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
        f"{source.name} is not JSON ({source.not_json}): only DeepSpeed's reader, which takes HJSON, accepts it; "
        "Transformers and Accelerate refuse the file"
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
