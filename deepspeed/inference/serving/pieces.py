"""Incremental parsing of an answer into text, reasoning and tool calls. Pure.

A format (`formats.py`) is a generator that reads an `AnswerText` and yields when it needs more text. Its decisions
depend on the text alone, never on where a piece ends, so an answer has the same parts however it is streamed, and each
character is looked at only a few times.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from deepspeed.inference.serving.text import overlap

Kind = Literal["text", "reasoning", "call", "arguments"]
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The callable functions, by name, with the JSON schema of their arguments."""

_Result = TypeVar("_Result")
Reading: TypeAlias = Generator[None, None, _Result]

_MARKS = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]", '"': '"'}
_SPACES = re.compile(r"\s*")
_WORD = re.compile(r"[A-Za-z0-9_.:/-]*")
_SCALAR = re.compile(r"[^\s,\]}]*")


_STRETCH = 256
"""Characters read at a time: for each marker in it, a reader may scan what has arrived once."""


def long_id() -> str:
    """Make a unique id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer. ``text``: for a call, the function's name; for arguments, a piece of their JSON text.
    ``index`` and ``id``: of the call."""

    kind: Kind
    text: str
    index: int = 0
    id: str = ""


class AnswerText:
    """The text of an answer received so far, and the parts found in it.

    Trailing white space of a text is held back: there is no text before and after calls, or around reasoning.
    """

    def __init__(self, make_id: Callable[[], str], limit: int | None) -> None:
        self.ended = False
        self.calls = self.closed = 0  # calls begun, and calls whose arguments are complete
        self.is_full = False  # the limit of calls is reached: later parts are dropped
        self._make_id, self._limit = make_id, limit
        self.kind: Kind = "text"  # of the last part
        self._text, self._at = "", 0  # received text, and the read position in it
        self._kept: list[str] | None = None  # read text that is output unless it turns out to be a call
        self._spaces: list[str] = []  # held back
        self._blank = False  # drop leading white space of the next text
        self._said = False
        self._found: list[Piece] = []

    def feed(self, text: str) -> None:
        """Append received text."""
        self._text, self._at = self._text[self._at :] + text, 0

    def pieces(self) -> list[Piece]:
        """Return the parts found since the last call, with neighbours of one kind joined."""
        found, self._found = self._found, []
        made: list[Piece] = []
        run: list[str] = []
        for each in found:
            joins = (
                each.kind != "call" and made and (made[-1].kind, made[-1].index) == (each.kind, each.index)
            )
            if joins:
                run.append(each.text)
                made[-1] = each
            else:
                _close(made, run)
                made.append(each)
                run = [each.text]
        _close(made, run)
        return made

    # ------------------------------------------------------------------------------------------------ reading

    def more(self) -> Reading[bool]:
        """Wait for unread text. Return False at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._at < len(self._text)

    def peek(self, count: int) -> Reading[str]:
        """Return the next ``count`` characters, without reading them; fewer at the end."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def take(self, count: int) -> str:
        """Read ``count`` characters, which must have arrived."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def skip(self, marker: str) -> Reading[bool]:
        """Read ``marker`` if it comes next; return whether it did."""
        found = (yield from self.peek(len(marker))) == marker
        if found:
            self.take(len(marker))
        return found

    def spaces(self) -> Reading[None]:
        """Read white space."""
        yield from self._run(_SPACES)

    def word(self) -> Reading[str]:
        """Read a function name, possibly empty."""
        return (yield from self._run(_WORD))

    def until(self, marker: str) -> Reading[str | None]:
        """Read up to and including ``marker``; return what precedes it. None: there is no marker."""
        before: list[str] = []
        found = yield from self.pass_until((marker,), before.append)
        return "".join(before) if found else None

    def pass_until(self, markers: tuple[str, ...], sink: Callable[[str], None]) -> Reading[str]:
        """Read up to and including the first of ``markers``, none of which contains the start of another, and return
        it; "" if there is none. Text before it goes to ``sink``."""
        while (yield from self.more()):
            text = self._text[self._at :]
            places = [(text.find(each), each) for each in markers if each in text]
            if places:
                place, marker = min(places)
                sink(self.take(place))
                self.take(len(marker))
                return marker
            held = 0 if self.ended else max((overlap(text, each) for each in markers), default=0)
            if len(text) > held:
                sink(self.take(len(text) - held))
            elif not self.ended:
                yield
        return ""

    def value(self, sink: Callable[[str], None]) -> Reading[bool]:
        """Read a JSON value into ``sink``. Return False if it is unterminated or its brackets do not match."""
        if (yield from self.peek(1)) not in _CLOSERS:
            scalar = yield from self._run(_SCALAR)
            sink(scalar)
            return bool(scalar)
        scan = _Scan()
        while (yield from self.more()):
            text = self._text[self._at :]
            end = scan.end(text)
            sink(self.take(len(text) if end is None else end))
            if end is not None:
                return not scan.broken
        return False

    def string(self) -> Reading[str | None]:
        """Read a JSON string and return its value. None: there is none."""
        if (yield from self.peek(1)) != '"':
            return None
        raw: list[str] = []
        whole = yield from self.value(raw.append)
        return decoded("".join(raw)) if whole else None

    def _run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read characters while they match ``pattern``."""
        run: list[str] = []
        while (yield from self.more()):
            match = pattern.match(self._text, self._at)
            count = match.end() - self._at if match else 0
            if count:
                run.append(self.take(count))
            if self._at < len(self._text):
                break
        return "".join(run)

    # ------------------------------------------------------------------------------------------------ finding

    def text_until(self, *markers: str) -> Reading[str]:
        """Output the text before the first of ``markers`` and return that marker; from it on, text is kept. "" if there
        is none."""
        self._kept = None
        marker = yield from self.pass_until(markers, lambda text: self.emit("text", text))
        self._kept = [marker]
        return marker

    def keep(self) -> None:
        """Keep text read from now on, to be output unless it turns out to be a call."""
        self._kept = []

    def drop(self) -> None:
        """Discard the kept text."""
        self._kept = None

    def emit_kept(self) -> None:
        """Output the kept text."""
        kept, self._kept = self._kept, None
        if kept:
            self.emit("text", "".join(kept))

    def emit(self, kind: Kind, text: str) -> None:
        """Output text or reasoning, without leading and trailing white space."""
        if kind != self.kind:
            self.kind, self._spaces, self._blank = kind, [], True
        core = text.rstrip()
        if not core:
            self._spaces.append(text)
            return
        rest = text[len(core) :]
        shown = core.lstrip() if self._blank else "".join([*self._spaces, core])
        self._spaces, self._blank = [rest] if rest else [], False
        self._said = self._said or kind == "text"
        self._note(kind, shown)

    def begin(self, name: str) -> None:
        """Start a call of ``name``, which the kept text belongs to."""
        self._kept = None
        self._blank = self._blank or not self._said
        self.is_full = self._has_all()  # also if the last call was not closed
        if not self.is_full:
            self._note("call", name, self.calls, self._make_id())
            self.calls += 1

    def emit_arguments(self, text: str) -> None:
        """Add text to the arguments of the current call."""
        self._note("arguments", text, self.calls - 1)

    def close(self) -> None:
        """Mark the arguments of the current call as complete."""
        if not self.is_full:
            self.closed += 1
            self.is_full = self._has_all()

    def flush(self) -> None:
        """Output held white space at the end of an answer without calls."""
        if self._spaces and self.kind == "text" and not self.calls and not self._blank:
            self._note("text", "".join(self._spaces))

    def _has_all(self) -> bool:
        return self._limit is not None and self.calls >= self._limit

    def _note(self, kind: Kind, text: str, index: int = 0, id: str = "") -> None:
        if not self.is_full:
            self._found.append(Piece(kind, text, index, id))


class Parser:
    """Splits an answer into its parts.

    Args:
        readers: run one after the other; what they leave is text.
        make_id: makes the id of a call.
        limit: number of calls after which nothing more is read; None: unlimited.
    """

    def __init__(
        self,
        *readers: Callable[[AnswerText], Reading[None]],
        make_id: Callable[[], str] = long_id,
        limit: int | None = None,
    ) -> None:
        self._source = AnswerText(make_id, limit)
        self._reading = self._read(readers)

    @property
    def is_complete(self) -> bool:
        """True: the limit of calls is reached, so nothing more is read."""
        return self._source.is_full

    @property
    def has_called(self) -> bool:
        """True: there are calls, all complete."""
        return 0 < self._source.calls == self._source.closed

    @property
    def is_reasoning(self) -> bool:
        """True: the last part found is reasoning."""
        return self._source.kind == "reasoning"

    def add(self, text: str) -> list[Piece]:
        """Return the parts that ``text`` completes."""
        for begin in range(0, len(text), _STRETCH):
            self._source.feed(text[begin : begin + _STRETCH])
            next(self._reading, None)
        return self._source.pieces()

    def finish(self) -> list[Piece]:
        """Return the remaining parts."""
        self._source.ended = True
        next(self._reading, None)
        return self._source.pieces()

    def _read(self, readers: tuple[Callable[[AnswerText], Reading[None]], ...]) -> Reading[None]:
        source = self._source
        for reader in readers:
            yield from reader(source)
        yield from source.text_until()
        source.flush()


class _Scan:
    """Finds the end of a JSON object, list or string that arrives in pieces."""

    def __init__(self) -> None:
        self.broken = False  # a bracket closes no other
        self._closers: list[str] = []
        self._escaped = False

    def end(self, piece: str) -> int | None:
        """Return the end position in ``piece``. None: not in this piece."""
        begin, self._escaped = int(self._escaped), False
        closers = self._closers
        for mark in _MARKS.finditer(piece, begin):
            sign = mark[0]
            if sign[0] == "\\":
                self._escaped = len(sign) == 1  # the escaped character is in the next piece
            elif closers and closers[-1] == sign:
                closers.pop()
                if not closers:
                    return mark.end()
            elif closers and closers[-1] == '"':
                continue
            elif sign in _CLOSERS:
                closers.append(_CLOSERS[sign])
            else:
                self.broken = True
                return mark.start()
        return None


def json_call(source: AnswerText, tools: Tools) -> Reading[bool]:
    """Read an object with a function's name and its arguments (or parameters), in any order; other members are ignored.
    Return False if it is something else, or the function is not in ``tools``; the text read is kept."""
    if not (yield from source.skip("{")):
        return False
    call = _JsonCall(source, tools)
    while True:
        yield from source.spaces()
        key = yield from source.string()
        yield from source.spaces()
        if key is None or not (yield from source.skip(":")):
            return call.begun
        yield from source.spaces()
        if not (yield from call.member(key)):
            return call.begun
        yield from source.spaces()
        if not (yield from source.skip(",")):
            break
    if (yield from source.skip("}")) and call.name is not None and not call.begun:
        call.begin("{}")
    return call.begun


class _JsonCall:
    """A partially read call."""

    def __init__(self, source: AnswerText, tools: Tools) -> None:
        self.name: str | None = None
        self.begun = False
        self._source, self._tools = source, tools
        self._early: str | None = None  # arguments that precede the name

    def member(self, key: str) -> Reading[bool]:
        """Read the value of ``key``. Return False if this is not a call, or is unterminated."""
        if key == "name" and self.name is None:
            name = yield from self._source.string()
            if name not in self._tools:
                return False
            self.name = name
            if self._early is not None:
                self.begin(self._early)
            return True
        if key in ("arguments", "parameters") and self._early is None and not self.begun:
            return (yield from self._arguments())
        return (yield from self._source.value(lambda _: None))

    def begin(self, arguments: str) -> None:
        """Output the whole call."""
        assert self.name is not None
        self.begun = True
        self._source.begin(self.name)
        self._source.emit_arguments(arguments)
        self._source.close()

    def _arguments(self) -> Reading[bool]:
        """Read an object, or a string that contains one, as some models write it."""
        source, first = self._source, (yield from self._source.peek(1))
        if self.name is not None and first == "{":
            self.begun = True
            source.begin(self.name)
            whole = yield from source.value(source.emit_arguments)
            if whole:
                source.close()
            return whole
        raw: list[str] = []
        if first not in ("{", '"') or not (yield from source.value(raw.append)):
            return False
        self._early = decoded("".join(raw)) if first == '"' else "".join(raw)
        if self._early is not None and self.name is not None:
            self.begin(self._early or "{}")
        return self._early is not None


def _close(made: list[Piece], run: list[str]) -> None:
    if made and len(run) > 1:
        made[-1] = Piece(made[-1].kind, "".join(run), made[-1].index, made[-1].id)


def decoded(text: str) -> str | None:
    """Decode a JSON string. None: malformed."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None
