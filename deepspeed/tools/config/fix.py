"""`ds_check --fix`: corrects a config where its meaning is unambiguous; anything that would be a guess is left alone.

Corrected are: a misspelt key with exactly one close match that is not already present; a deprecated spelling whose
successor is not already present; a value of the wrong type but clear meaning (`"fp16": true`, `"lr": "1e-3"`, a
misspelt choice).
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from deepspeed.base.exceptions import ExplainedError
from deepspeed.config.analysis import OLD_TOP_LEVEL
from deepspeed.config.keys import documented_name, is_deprecated, keys_of
from deepspeed.config.problems import Problem
from deepspeed.config.reader import ConfigSource
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.section import extra_facts, is_auto, keeps_value
from deepspeed.tools.config.report import ConfigReport

ROUNDS = 100
"""A correction may reveal further errors, such as those under a misspelt section; needing more rounds than this is a
bug."""


class CannotFix(ExplainedError, ValueError):
    """The file cannot be corrected at all; the message says why."""


def start_text(source: ConfigSource, *, in_place: bool) -> str:
    """Return the text to correct: the file's own or, for HJSON and YAML written to another file, its data as plain
    JSON. Raises CannotFix for these ``in_place``."""
    text = source.text or ""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        if in_place:
            raise CannotFix(
                f"{source.name} is not JSON, and its comments would be lost: give --output FILE to write the "
                "corrected config there as plain JSON"
            ) from None
        return json.dumps(source.data, indent=2) + "\n"
    return text


def corrected(
    text: str, name: str, check: Callable[[ConfigSource], ConfigReport]
) -> tuple[str, ConfigReport]:
    """Return the text with all unambiguous corrections, and the report of `check` about it."""
    for _ in range(ROUNDS):
        source = ConfigSource(json.loads(text), name, text)
        report = check(source)
        edits = list(_edits(source.data, report.errors))
        if not edits:
            return text, report
        removals = [edit for edit in edits if edit.removes]  # one at a time: adjacent keys share a comma
        text = apply_edits(text, [*(edit for edit in edits if not edit.removes), *removals[:1]])
    raise AssertionError(f"corrections of {name} do not converge: {edits}")


def unified(before: str, after: str, path: str) -> Iterator[str]:
    """Return the changes as a unified diff."""
    lines = before.splitlines(), after.splitlines()
    return difflib.unified_diff(*lines, path, f"{path} (corrected)", lineterm="")


def write_fixed(path: str, text: str, output: str | None) -> None:
    """Write the corrected text to `output`; without it, to `path`, after backing up the original."""
    target = os.path.realpath(path if output is None else output)
    if output is None:
        backup = _free_name(f"{target}.bak")
        shutil.copy2(target, backup)
        print(f"the file as it was: {backup}")
    try:
        descriptor, aside = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".ds_check-")
    except OSError as error:
        raise OSError(error.errno, error.strerror, output or path) from None
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


# ----------------------------------------------------------------------------------------------- edits of a round


def _edits(data: Mapping[str, Any], errors: list[Problem]) -> Iterator[Edit]:
    """Yield the edits of one round. Deprecated spellings are replaced once no correctable error is left."""
    taken: set[Path] = set()
    remedies = [(problem.path[:-1], problem.remedy) for problem in errors if problem.remedy is not None]
    renames: Counter[Path] = Counter(
        (*parents, remedy.rename) for parents, remedy in remedies if remedy.rename is not None
    )
    for problem in errors:
        if problem.remedy is None or not _leads_to_key(data, problem.path):
            continue
        new = (*problem.path[:-1], problem.remedy.rename or problem.path[-1])
        if new in taken:
            continue  # two misspellings of one key: the intended value is ambiguous
        taken.add(new)
        remedy = problem.remedy
        if remedy.rename is not None and renames[new] > 1:
            continue
        yield Edit(problem.path, remedy.rename, remedy.value, remedy.replaces_value)
    if not taken:
        yield from _deprecated(data, TrainingConfig, ())


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
    """Yield the edit that renames a deprecated key; a key without effect, or switched off, is removed."""
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


# Edits of single keys and values in the text of a JSON file; the rest keeps its formatting.


Path = tuple[str | int, ...]

_BLANK = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Edit:
    """One change at a path: a new name for the key, a new value, or removal of the key."""

    path: Path
    rename: str | None = None
    value: Any = None
    replaces_value: bool = False
    removes: bool = False


@dataclass(frozen=True)
class TextSpan:
    """Intervals [begin, end) of a key and of its value in the text, in characters."""

    key: tuple[int, int]
    value: tuple[int, int]


def spans(text: str) -> dict[Path, TextSpan]:
    """Return the spans of every key of every object in a JSON text, by path."""
    found: dict[Path, TextSpan] = {}
    _read_value(text, _skip(text, 0), (), found)
    return found


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Apply all edits to the text. Paths refer to `text`; none may lie inside a value that another edit replaces."""
    where = spans(text)
    pieces: list[tuple[int, int, str]] = []
    for edit in edits:
        span = where[edit.path]
        if edit.removes:
            pieces.append((*_with_comma(text, span), ""))
            continue
        if edit.rename is not None:
            pieces.append((*span.key, json.dumps(edit.rename)))
        if edit.replaces_value:
            pieces.append((*span.value, json.dumps(edit.value)))
    for begin, end, new in sorted(pieces, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def _skip(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    return match.end() if match else at


def _read_value(text: str, at: int, path: Path, found: dict[Path, TextSpan]) -> int:
    """Read the value starting at `at`; return its end."""
    if text[at] == "{":
        return _read_object(text, at, path, found)
    if text[at] == "[":
        return _read_list(text, at, path, found)
    return _DECODER.raw_decode(text, at)[1]


def _read_object(text: str, at: int, path: Path, found: dict[Path, TextSpan]) -> int:
    at = _skip(text, at + 1)
    while text[at] != "}":
        name, key_end = _DECODER.raw_decode(text, at)
        value_begin = _skip(text, _skip(text, key_end) + 1)  # after the colon
        value_end = _read_value(text, value_begin, (*path, name), found)
        found[(*path, name)] = TextSpan((at, key_end), (value_begin, value_end))
        at = _skip(text, value_end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return at + 1


def _read_list(text: str, at: int, path: Path, found: dict[Path, TextSpan]) -> int:
    at, index = _skip(text, at + 1), 0
    while text[at] != "]":
        at = _skip(text, _read_value(text, at, (*path, index), found))
        index += 1
        if text[at] == ",":
            at = _skip(text, at + 1)
    return at + 1


def _with_comma(text: str, span: TextSpan) -> tuple[int, int]:
    """Return the interval of a key and its value, with the comma after it and the blanks up to the next key, or with
    the comma before it."""
    begin, end = span.key[0], span.value[1]
    after = _skip(text, end)
    if text[after] == ",":
        return begin, _skip(text, after + 1)
    before = len(text[:begin].rstrip())
    return (before - 1, end) if text[before - 1] == "," else (begin, end)
