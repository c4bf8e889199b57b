"""Changing single keys and values in the text of a JSON file; everything else keeps its author's layout."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]

_BLANK = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Edit:
    """One change at a path: another name for the key, another value, or removal of the key."""

    path: Path
    rename: str | None = None
    value: Any = None
    replaces_value: bool = False
    removes: bool = False


@dataclass(frozen=True)
class TextSpan:
    """The interval of a key of an object, and of its value: [begin, end) in the text."""

    key: tuple[int, int]
    value: tuple[int, int]


def spans(text: str) -> dict[Path, TextSpan]:
    """Every key of every object in a JSON text."""
    found: dict[Path, TextSpan] = {}
    _read_value(text, _skip(text, 0), (), found)
    return found


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with all changes. Paths refer to `text`; none may be inside a value that another edit replaces."""
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
    """Reads the value starting at `at`; returns where it ends."""
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
    """The key and its value, with the comma after it and the space up to the next key, or the comma before it."""
    begin, end = span.key[0], span.value[1]
    after = _skip(text, end)
    if text[after] == ",":
        return begin, _skip(text, after + 1)
    before = len(text[:begin].rstrip())
    return (before - 1, end) if text[before - 1] == "," else (begin, end)
