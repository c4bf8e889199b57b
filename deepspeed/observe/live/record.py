"""The record of a run: an append-only JSON Lines file.

A line is a *row* (an array: aggregates over consecutive steps, in the order of ``COLUMNS``) or an *item* (an object:
the start of a process, a resume, an event, additional curves, the state of the ranks). Steps that are repeated after a
resume from an older checkpoint follow later in the file, after a line with the step from which they count; readers
drop the earlier ones (``MetricHistory``).

Size: a row is about 130 bytes, and there is at most one per ``StepWindow.width_s``: one second in the first hours, then
``GROWTH`` of the run's duration. So 24 hours need about 50,000 rows however short the steps are, and ten days three
times as many.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

NAME = "history.jsonl"
VERSION = 1

SPANS: tuple[str, ...] = ("forward", "backward", "inner", "reduction", "update")
"""Parts of a step in milliseconds; ``backward`` is ``inner`` and the exposed ``reduction``."""

COLUMNS = (
    "t", "first", "last", "seconds", "samples", "tokens", "loss", "low", "high", "lr", "norm", "memory", *SPANS,
)  # fmt: skip
"""Columns of a row: end time in seconds since the epoch, first and last step, total seconds, samples and tokens; mean,
smallest and largest loss; last learning rate; mean gradient norm; memory of rank 0 in bytes; milliseconds per step by
span."""

T, FIRST, LAST, SECONDS, SAMPLES, TOKENS, LOSS, LOW, HIGH, LR, NORM, MEMORY, SPAN = range(13)

Row = list[Any]
Item = dict[str, Any]

WIDTH_S = 1.0
GROWTH = 1 / 20_000


class LiveStep(NamedTuple):
    """One optimizer step on rank 0. None: unknown."""

    number: int
    time: float
    seconds: float | None
    samples: int
    tokens: int | None
    loss: float | None
    rate: float | None
    norm: float | None
    spans: tuple[float, ...] | None = None


class Mean:
    """Running mean of the finite values."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float | None, times: int = 1) -> None:
        if is_known(value):
            self.total += value * times  # type: ignore[operator]
            self.count += times

    def value(self) -> float | None:
        return self.total / self.count if self.count else None


class StepWindow:
    """Aggregates consecutive steps into one row."""

    def __init__(self) -> None:
        self.active_s = 0.0  # seconds of all steps so far, over every process of the run
        self._clear()

    def _clear(self) -> None:
        self.first: int | None = None
        self.last = 0
        self.began = self.ended = self.seconds = 0.0
        self.samples = 0
        self.tokens: int | None = None
        self.low, self.high = math.inf, -math.inf
        self.rate: float | None = None
        self.loss, self.norm = Mean(), Mean()
        self.spans = [Mean() for _ in SPANS]

    @property
    def width_s(self) -> float:
        return max(WIDTH_S, self.active_s * GROWTH)

    def is_due(self, now: float) -> bool:
        return self.first is not None and now - self.began >= self.width_s

    def add(self, step: LiveStep) -> None:
        if self.first is None:
            self.first, self.began = step.number, step.time - (step.seconds or 0.0)
        self.last, self.ended = step.number, step.time
        seconds = step.seconds or 0.0
        self.seconds += seconds
        self.active_s += seconds
        self.samples += step.samples
        if step.tokens is not None:
            self.tokens = (self.tokens or 0) + step.tokens
        self.rate = step.rate
        self.norm.add(step.norm)
        self.loss.add(step.loss)
        if is_known(step.loss):
            self.low, self.high = min(self.low, step.loss), max(self.high, step.loss)  # type: ignore[type-var]
        if step.spans is not None:
            for mean, value in zip(self.spans, step.spans, strict=True):
                mean.add(value)

    def take_row(self, memory_bytes: int | None) -> Row:
        """Return the row of the added steps, and clear the window. Its memory is ``memory_bytes``."""
        loss = self.loss.value()
        row: Row = [
            round(self.ended, 1), self.first, self.last, short(self.seconds), self.samples, self.tokens,
            short(loss), short(None if loss is None else self.low), short(None if loss is None else self.high),
            short(self.rate), short(self.norm.value()), memory_bytes, *(short(mean.value()) for mean in self.spans),
        ]  # fmt: skip
        self._clear()
        return row


def merged(a: Row, b: Row) -> Row:
    """Merge two neighbouring rows into one."""
    counts = [row[LAST] - row[FIRST] + 1 for row in (a, b)]

    def mean(column: int) -> float | None:
        of = Mean()
        for row, count in zip((a, b), counts, strict=True):
            of.add(row[column], count)
        return short(of.value())

    def known(column: int) -> list[Any]:
        return [row[column] for row in (a, b) if row[column] is not None]

    return [
        b[T], a[FIRST], b[LAST], short(a[SECONDS] + b[SECONDS]), a[SAMPLES] + b[SAMPLES],
        sum(known(TOKENS)) if known(TOKENS) else None, mean(LOSS), min(known(LOW), default=None),
        max(known(HIGH), default=None), b[LR], mean(NORM), max(known(MEMORY), default=None),
        *(mean(SPAN + i) for i in range(len(SPANS))),
    ]  # fmt: skip


def is_known(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def short(value: float | None) -> float | None:
    """Round to five significant digits; None for NaN and infinities, which JSON lacks."""
    return float(f"{value:.5g}") if is_known(value) else None  # type: ignore[str-format]


def as_line(entry: Row | Item) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def read_record(path: Path) -> Iterator[Row | Item]:
    """Yield the rows and items of a record, skipping lines that a crash or a full disk has truncated.

    ValueError: it is not a record, or of a later version.
    """
    with open(path, "rb") as file:
        yield from _entries(file, path, at_start=True)


def read_more(path: Path, offset: int) -> tuple[list[Row | Item], int]:
    """Return the complete entries after byte ``offset``, and the offset of their end."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data.rfind(b"\n") + 1
    return list(_entries(data[:whole].splitlines(), path, at_start=offset == 0)), offset + whole


def _entries(lines: Iterable[bytes], path: Path, *, at_start: bool) -> Iterator[Row | Item]:
    for number, line in enumerate(lines):
        entry: Any = None
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
        if at_start and number == 0:
            version = entry.get("live") if isinstance(entry, dict) else None
            if not isinstance(version, int) or version > VERSION:
                raise ValueError(f"{path} is not a run record that this release can read")
        elif isinstance(entry, dict) or (isinstance(entry, list) and len(entry) == len(COLUMNS)):
            yield entry


class RecordInUse(OSError):
    """Another run holds this record open."""


class RecordFile:
    """Appends to the record in a folder. Every method may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._file: Any = None
        self._torn = False

    def open(self) -> list[Row | Item]:
        """Open the file and return its existing entries. RecordInUse: another run has it open."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - as long as the run
        if not _lock(file):
            file.close()
            raise RecordInUse(f"{self.path} is in use by another run")
        self._file = file
        if file.tell() == 0:
            return []
        with open(self.path, "rb") as old:
            old.seek(-1, os.SEEK_END)
            self._torn = old.read(1) != b"\n"
        try:
            return list(read_record(self.path))
        except ValueError:  # another kind of file, or a later version: kept, but not continued
            self.set_aside()
            return []

    def set_aside(self) -> None:
        """Begin a new file, and keep the old one under another name in the folder."""
        number = 1
        while (aside := self.path.with_name(f"history-{number}.jsonl")).exists():
            number += 1
        self.path.rename(aside)
        self.close()
        self.open()

    @property
    def is_open(self) -> bool:
        return self._file is not None

    @property
    def is_empty(self) -> bool:
        return self._file.tell() == 0

    def write(self, entries: Iterable[Row | Item]) -> None:
        lines = b"".join(map(as_line, entries))
        if not lines:
            return
        if self.is_empty:
            lines = as_line({"live": VERSION, "columns": COLUMNS}) + lines
        elif self._torn:
            lines = b"\n" + lines
        self._torn = True
        self._torn = self._file.write(lines) != len(lines)
        if self._torn:
            raise OSError("the disk is full")

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _lock(file: Any) -> bool:
    """Lock the file; return False if another run holds the lock, True also where locks are not supported."""
    try:
        import fcntl  # not on every system
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
