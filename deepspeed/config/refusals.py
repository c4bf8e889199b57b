"""Messages for values that the schema refuses: the key, the value, what is expected and what was probably meant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from deepspeed.config.keys import allowed, choices_of, documented_name, field_at, keys_of, section_at, type_of
from deepspeed.config.problems import Remedy, nearest, shown
from deepspeed.config.reader import Path
from deepspeed.config.section import NO_BOOLEAN

# The key that a section's bare value stands for, where it is not `enabled`.
NAMED_BY: dict[Path, str] = {("optimizer",): "type", ("scheduler",): "type"}


def refusals(
    schema: type[BaseModel], error: ValidationError, data: Mapping[str, Any], raw: Mapping[str, Any]
) -> list[tuple[Path, str, str]]:
    """Return (path, message, missing key) for each value that an error concerns.

    `data`: the input of `schema`; `raw`: the values as written.
    """
    found: dict[Path, tuple[Path, str, str]] = {}
    for entry in error.errors():
        path, missing = _path_in(entry["loc"], data)
        message = f"'{missing}' is missing" if missing else _message(schema, path, entry, raw)
        found.setdefault(path, (path, message, missing))
    return list(found.values())


def _path_in(loc: tuple[str | int, ...], data: Any) -> tuple[Path, str]:
    """Return the part of a pydantic location that exists in the config (without the tags of union members), and the
    name of the missing key if the location ends at one.
    """
    path: list[str | int] = []
    missing = ""
    for part in loc:
        if _has(data, part):
            data = data[part]
        else:
            missing = str(part) if isinstance(data, Mapping) else missing
            continue
        path.append(part)
    return tuple(path), missing


def _message(schema: type[BaseModel], path: Path, entry: Any, raw: Mapping[str, Any]) -> str:
    value = value_at(raw, path, entry["input"])
    if entry["type"] == "extra_forbidden":
        return _unknown(schema, path, value, raw)
    found = field_at(schema, path)
    own_text = (
        str(entry.get("ctx", {}).get("error", ""))
        if entry["type"] in ("value_error", "assertion_error")
        else ""
    )
    if isinstance(value, (dict, BaseModel)) and own_text:
        return own_text  # a rule of the whole section
    message = f"{shown(value)} is not allowed"
    if found is not None:
        message += f"; expected {_expected(found, path)}"
        if own_text and own_text != NO_BOOLEAN and own_text.removeprefix("must be ") not in message:
            message += f" ({own_text})"
        choices = [str(choice) for choice in choices_of(found) if choice is not None]
        hint = nearest(value, choices) if isinstance(value, str) and choices else None
        meant = plain_meaning(schema, path, value)
        if hint:
            message += f"; did you mean '{hint}'?"
        elif meant is not None:
            message += f"; did you mean {json.dumps(meant.value)}?"
    return message


def _unknown(schema: type[BaseModel], path: Path, value: Any, raw: Mapping[str, Any]) -> str:
    table = keys_of(section_at(schema, path[:-1]) or schema)
    for other in value_at(raw, path[:-1], {}):
        if other != path[-1] and other in table and table[other] is table.get(str(path[-1])):
            return f"given twice, also as '{other}': keep one of them (value: {shown(value)})"
    close = nearest(str(path[-1]), table)
    if close is not None:
        meant = ".".join(map(str, (*path[:-1], close)))
        return f"unknown key; did you mean '{meant}'? (value: {shown(value)})"
    known = ", ".join(sorted({documented_name(key.name, key.field) for key in table.values()}))
    return f"unknown key (value: {shown(value)}). Known here: {known}"


def _expected(found: Any, path: Path) -> str:
    text = allowed(found)
    return text.removeprefix("a list of ") if path and isinstance(path[-1], int) else text


def value_at(data: Any, path: Path, default: Any) -> Any:
    """Return the value at a path of a config as written."""
    for part in path:
        if not _has(data, part):
            return default
        data = data[part]
    return data


def _has(data: Any, part: str | int) -> bool:
    """Tell whether an object holds the key, or a list the index."""
    if isinstance(data, list):
        return isinstance(part, int) and part < len(data)
    return isinstance(data, Mapping) and part in data


# The plain meaning of a value of the wrong type: `"fp16": true` means `{"enabled": true}`.


def plain_meaning(schema: type[BaseModel], path: Path, value: Any) -> Remedy | None:
    """Return the value that was meant at a path of a config with this schema; None if that would be a guess."""
    field = field_at(schema, path)
    if field is None:
        return None
    section = section_at(schema, path)
    if section is not None:
        return _section(path, section, value)
    if isinstance(value, str):
        choices = [choice for choice in choices_of(field) if isinstance(choice, str)]
        if close := nearest(value, choices):
            return _instead(close)
        if type_of(field).startswith("list of text"):
            return _instead([value])
    return None


def _section(path: Path, section: type[BaseModel], value: Any) -> Remedy | None:
    known = keys_of(section)
    if path == ("zero_optimization",) and isinstance(value, int) and 0 <= value <= 3:
        return _instead({"stage": int(value)})
    if isinstance(value, bool) and "enabled" in known:
        return _instead({"enabled": value})
    if isinstance(value, str) and path in NAMED_BY:
        return _instead({NAMED_BY[path]: value})
    return None


def _instead(value: Any) -> Remedy:
    return Remedy(value=value, replaces_value=True)
