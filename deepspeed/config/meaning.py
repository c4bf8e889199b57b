"""The plain meaning of a value of the wrong type: `"fp16": true` is `{"enabled": true}`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from deepspeed.config.keys import choices_of, field_at, keys_of, section_at, type_of
from deepspeed.config.problems import Remedy, nearest
from deepspeed.config.reader import Path

# The key that a section's bare value stands for, where it is not `enabled`.
NAMED_BY: dict[Path, str] = {("optimizer",): "type", ("scheduler",): "type"}


def plain_meaning(schema: type[BaseModel], path: Path, value: Any) -> Remedy | None:
    """The value that was meant at a path of a config of this schema; None if that would be a guess."""
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
