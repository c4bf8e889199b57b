"""Parsing of request bodies, with bounded time and memory for any input. Pure."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from dataclasses import dataclass, field
from typing import Any, NoReturn

from deepspeed.base.exceptions import ExplainedError

MAX_PARTS = 2**16
"""Maximum strings, lists and objects per request. Each takes up to 250 bytes of memory for 3 bytes of JSON."""

MAX_VALUES = 2**19
"""Maximum values in all lists and objects."""

_MAX_DIGITS = 100
"""Maximum digits of an integer: the time to parse one is quadratic in its length."""

LONG = 64 * 2**10
"""Size in bytes above which a body is long: the longest short one takes about 0.1 s."""

_PIECE = 64 * 2**10
"""Bytes checked per call of C code: less than 2 ms, after which other threads can run."""

_NO_MARKS = b"".join(bytes([each]) for each in range(256) if each not in b'"[{,')

# A high surrogate not followed by a low one, or a low one not preceded by a high one.
_HALF_PAIR = re.compile(
    rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F]..(?<!\\u[dD][89abAB]..\\u....))", re.DOTALL
)
_HIGH = re.compile(rb"\\u[dD][89abAB]")
_PAIR_BYTES = 12  # of \ud83d\ude42

_parsing = threading.Lock()
"""Held while a long body is parsed. The event loop, which waits for the interpreter lock several times per request,
then competes with only one such thread."""


class RequestError(ExplainedError, ValueError):
    """A request that cannot be served. ``field``: the offending field, if any. ``code``: OpenAI's error code, if
    any."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


@dataclass(slots=True)
class JsonBudget:
    """Parts and values of a request that may still be parsed."""

    parts: int = field(default_factory=lambda: MAX_PARTS)
    values: int = field(default_factory=lambda: MAX_VALUES)


def fields_of(body: bytes) -> dict[str, Any]:
    """Parse a body. RequestError: it is not a JSON object in UTF-8, or has too many parts or values."""
    try:
        fields = parsed(body, JsonBudget())
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"body: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(f"body: expected an object, not {kind_of(fields)}")
    return fields


def parsed(text: bytes, budget: JsonBudget, where: str | None = None) -> Any:
    """Parse JSON, and subtract its parts and values from ``budget``. ``where``: the field that contains it; None: it is
    the body. RequestError: the budget is exceeded. ValueError: it is not JSON in UTF-8."""
    with _parsing if len(text) > LONG else contextlib.nullcontext():
        _check(text, budget, where)
        try:
            # Callbacks in Python let other threads run.
            return json.loads(text.decode(), parse_int=_integer, parse_float=_number, parse_constant=_refuse)
        except RecursionError:
            raise ValueError("lists or objects are nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from error


def _check(body: bytes, budget: JsonBudget, where: str | None) -> None:
    """Count parts and values, and look for lone surrogates, before any object is created. Works piece by piece, since
    each call holds the interpreter lock."""
    most = budget.parts
    quotes = brackets = commas = 0
    rest = b""
    for begin in range(0, len(body), _PIECE):
        # From here on, each quotation mark begins or ends a string, and each backslash begins an escape.
        piece = rest + body[begin : begin + _PIECE]
        piece = piece.replace(rb"\\", b"__").replace(rb"\"", b"__")
        if begin + _PIECE < len(body):
            piece, rest = _cut_before_escape(piece)
        marks, inside = piece.translate(None, delete=_NO_MARKS), quotes % 2
        quotes += marks.count(b'"')
        if quotes // 2 <= most:
            marks = b"".join(marks.split(b'"')[inside::2])  # those outside strings
        brackets += marks.count(b"[") + marks.count(b"{")
        commas += marks.count(b",")
        if quotes // 2 + brackets > most:
            raise RequestError(f"{where or 'body'}: more than {MAX_PARTS:,} strings, lists, objects", where)
        if commas >= budget.values:
            raise RequestError(f"{where or 'body'}: more than {MAX_VALUES:,} values", where)
        if _HALF_PAIR.search(piece):
            raise ValueError("an escape is an unpaired surrogate")
    budget.parts -= quotes // 2 + brackets
    budget.values -= commas


def _cut_before_escape(piece: bytes) -> tuple[bytes, bytes]:
    """Split off an escape at the end that may be incomplete, together with the first half of its surrogate pair."""
    end = piece.find(b"\\", max(0, len(piece) - _PAIR_BYTES))
    if end < 0:
        return piece, b""
    if end >= _PAIR_BYTES // 2 and _HIGH.match(piece, end - _PAIR_BYTES // 2):
        end -= _PAIR_BYTES // 2
    return piece[:end], piece[end:]


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits: at most {_MAX_DIGITS} are supported")
    return int(digits)


def _number(digits: str) -> float:
    return float(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def kind_of(value: Any) -> str:
    """Name the kind of a parsed value, for messages."""
    return _KINDS.get(type(value), "a number")
