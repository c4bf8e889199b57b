"""`ds_check --fix`: corrects a config where its meaning is clear; what would be a guess is left to its author.

Clear cases are: a misspelt key whose only near name is not already present; a deprecated spelling whose successor is
not already present; a value of another type that says the same (`"fp16": true`, `"lr": "1e-3"`, a misspelt choice).
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from deepspeed.config.analysis import OLD_TOP_LEVEL
from deepspeed.config.keys import documented_name, is_deprecated, keys_of
from deepspeed.config.problems import Problem
from deepspeed.config.reader import ConfigSource
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.section import extra_facts, is_auto, keeps_value
from deepspeed.tools.config.edit import Edit, Path, apply_edits
from deepspeed.tools.config.report import ConfigReport

ROUNDS = 100
"""A correction may reveal other errors, such as those under a misspelt section; more rounds than that are our
mistake."""


class CannotFix(ValueError):
    """A file that cannot be corrected at all, and why."""


def start_text(source: ConfigSource, *, in_place: bool) -> str:
    """The text to start from: the file's own, or plain JSON if that is HJSON and is written to another file."""
    text = source.text or ""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        if in_place:
            raise CannotFix(
                f"{source.name} is HJSON, whose comments would be lost: give --output FILE, and the corrected config "
                "is written there as plain JSON"
            ) from None
        return json.dumps(source.data, indent=2) + "\n"
    return text


def corrected(
    text: str, name: str, check: Callable[[ConfigSource], ConfigReport]
) -> tuple[str, ConfigReport]:
    """The text with all clear cases corrected, and what `check` then says about it."""
    for _ in range(ROUNDS):
        source = ConfigSource(json.loads(text), name, text)
        report = check(source)
        edits = list(_edits(source.data, report.errors))
        if not edits:
            return text, report
        removals = [edit for edit in edits if edit.removes]  # one at a time: neighbours share a comma
        text = apply_edits(text, [*(edit for edit in edits if not edit.removes), *removals[:1]])
    raise AssertionError(f"corrections of {name} do not converge: {edits}")


def unified(before: str, after: str, path: str) -> Iterator[str]:
    """The changes as a unified diff."""
    lines = before.splitlines(), after.splitlines()
    return difflib.unified_diff(*lines, path, f"{path} (corrected)", lineterm="")


def write_fixed(path: str, text: str, output: str | None) -> None:
    """Write the corrected text to `output`, or without it to `path`, after keeping the original under another name."""
    target = os.path.realpath(path if output is None else output)
    if output is None:
        backup = _free_name(f"{target}.bak")
        shutil.copy2(target, backup)
        print(f"the file as it was: {backup}")
    descriptor, aside = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".ds_check-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        shutil.copymode(path, aside)
        os.replace(aside, target)
    except BaseException:
        os.unlink(aside)
        raise


def _free_name(name: str) -> str:
    found, number = name, 0
    while os.path.lexists(found):
        number += 1
        found = f"{name}{number}"
    return found


# ------------------------------------------------------------------------------------------------- what is plain


def _edits(data: Mapping[str, Any], errors: list[Problem]) -> Iterator[Edit]:
    """The changes of one round. Deprecated spellings wait until no correctable error is left."""
    taken: set[Path] = set()
    for problem in errors:
        if problem.remedy is None or not _leads_to_key(data, problem.path):
            continue
        new = (*problem.path[:-1], problem.remedy.rename or problem.path[-1])
        if new in taken:
            continue  # two misspellings of one key: which value is meant?
        taken.add(new)
        remedy = problem.remedy
        if remedy.rename is not None and sum(_renames_to(other, new) for other in errors) > 1:
            continue
        yield Edit(problem.path, remedy.rename, remedy.value, remedy.replaces_value)
    if not taken:
        yield from _deprecated(data, TrainingConfig, ())


def _renames_to(problem: Problem, new: Path) -> bool:
    return (
        problem.remedy is not None
        and problem.remedy.rename is not None
        and (*problem.path[:-1], problem.remedy.rename) == new
    )


def _leads_to_key(data: Any, path: Path) -> bool:
    """Tell whether the path ends at a key that is present in the config."""
    for part in path[:-1]:
        if not (isinstance(data, Mapping) and part in data):
            return False
        data = data[part]
    return bool(path) and isinstance(data, Mapping) and path[-1] in data


def _deprecated(data: Mapping[str, Any], model: type[BaseModel], path: Path) -> Iterator[Edit]:
    table = keys_of(model)
    for name, value in data.items():
        here = (*path, name)
        if not path and name in OLD_TOP_LEVEL:
            if OLD_TOP_LEVEL[name] not in data:
                yield Edit(here, rename=OLD_TOP_LEVEL[name])
        elif here == ("zero_optimization",) and isinstance(value, bool):
            yield Edit(here, value={"stage": int(value)}, replaces_value=True)
        elif (key := table.get(name)) is None:
            continue
        elif is_deprecated(key.field):
            yield from _successor(here, value, data, model)
        elif key.section is not None and key.container is None and isinstance(value, Mapping):
            yield from _deprecated(value, key.section, here)


def _successor(path: Path, value: Any, siblings: Mapping[str, Any], model: type[BaseModel]) -> Iterator[Edit]:
    """Return a deprecated key under its new name; one that has no effect, or is switched off, is removed."""
    table = keys_of(model)
    facts = extra_facts(table[str(path[-1])].field)
    target = facts.get("new_param")
    if target is None:
        yield Edit(path, removes=True)
        return
    if "." in target or any(key in siblings and table[key].name == target for key in table):
        return  # it belongs in another section, or is already present
    new = documented_name(target, model.model_fields[target])
    if keeps_value(facts) or is_auto(value):
        yield Edit(path, rename=new)
    elif not value:
        yield Edit(path, removes=True)
    else:
        made = facts["new_param_fn"](value)
        written = made.model_dump(mode="json", exclude_unset=True) if isinstance(made, BaseModel) else made
        yield Edit(path, rename=new, value=written, replaces_value=True)
