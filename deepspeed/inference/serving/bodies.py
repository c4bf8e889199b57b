"""From the bytes of a request to its fields, with bounded time and memory whatever the bytes are. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

MOST_PARTS = 2**16
"""Texts, lists and objects of a request. Each takes up to 250 bytes of memory for 3 bytes of JSON."""

MOST_VALUES = 2**19
"""Values of all lists and objects."""

_LONGEST_INTEGER = 100
"""Digits. The time to parse one grows with their square."""

# A high surrogate without a low one after it, or a low one without a high one before it.
_HALF_PAIR = re.compile(
    rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F]..(?<!\\u[dD][89abAB]..\\u....))", re.DOTALL
)


class RequestError(ValueError):
    """A request that cannot be served. ``field``: which part of it, if one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def fields_of(body: bytes) -> dict[str, Any]:
    """Parse a body. RequestError: it is no JSON object in UTF-8, or has more parts or values than a request needs."""
    # Afterwards each quotation mark begins or ends a text, and each backslash begins an escape.
    plain = body.replace(rb"\\", b"__").replace(rb"\"", b"__")
    _check_size(plain)
    if _HALF_PAIR.search(plain):
        raise RequestError("body: an escape is one half of a surrogate pair")
    try:
        # Functions of Python: while they are called, other threads get their turn.
        fields = json.loads(body.decode(), parse_int=_integer, parse_float=_number, parse_constant=_refuse)
    except RecursionError:
        raise RequestError("body: lists or objects are nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"body: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(f"body: an object is expected, not {kind_of(fields)}")
    return fields


def _check_size(plain: bytes) -> None:
    """Count before anything is built, in calls of milliseconds each."""
    marks = plain.translate(None, delete=bytes(set(range(256)) - set(b'"[{,')))
    texts = marks.count(b'"') // 2
    if texts <= MOST_PARTS:
        marks = b"".join(marks.split(b'"')[::2])  # those that are in no text
    if texts + marks.count(b"[") + marks.count(b"{") > MOST_PARTS:
        raise RequestError(f"body: more than {MOST_PARTS:,} texts, lists and objects")
    if marks.count(b",") >= MOST_VALUES:
        raise RequestError(f"body: more than {MOST_VALUES:,} values")


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_INTEGER:
        raise ValueError(f"an integer of {len(digits):,} digits: at most {_LONGEST_INTEGER} are read")
    return int(digits)


def _number(digits: str) -> float:
    return float(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def kind_of(value: Any) -> str:
    """Name the kind of a parsed value, for messages."""
    return _KINDS.get(type(value), "a number")
