"""Problems of a config, and their report: one problem per key, all in one message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from deepspeed.base.exceptions import ExplainedError

FROM_DICT, FROM_BASE64, FROM_INFERENCE = "config", "base64 config", "config of init_inference"
WITHOUT_FILE = (FROM_DICT, FROM_BASE64, FROM_INFERENCE)
"""Names of configs that do not come from a file."""


MAX_LISTED = 50
"""Most entries of one list in a message; the rest is counted."""
MAX_NAME = 200
"""Characters; a longer key is not matched as a misspelling."""
MAX_MESSAGE = 4000


@dataclass(frozen=True)
class Remedy:
    """An unambiguous correction: another name for the key, or another value."""

    rename: str | None = None
    value: Any = None
    replaces_value: bool = False


class ConfigLocation(NamedTuple):
    """Line and column of a key in the config's text, from 1. ``file``: None for text passed as an argument."""

    file: str | None
    line: int
    column: int

    def __str__(self) -> str:
        """Format as editors and terminals recognize it."""
        return (
            f"{self.file}:{self.line}:{self.column}"
            if self.file
            else f"line {self.line}, column {self.column}"
        )


@dataclass(frozen=True)
class Problem:
    """One mistake: the key (dotted), the message, the place if it came from a file, and, if unambiguous, the
    remedy.
    """

    key: str
    message: str
    place: ConfigLocation | None = None
    remedy: Remedy | None = field(default=None, compare=False)
    path: tuple[str | int, ...] = field(default=(), compare=False)
    """The key as parts, which may contain dots."""
    raised_as: type[DeepSpeedConfigError] | None = field(default=None, compare=False)
    """The documented exception for this problem, if it has a specific one."""

    @property
    def line(self) -> int | None:
        return self.place.line if self.place else None

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"{cut(self.key)}{place}: {cut(self.message, MAX_MESSAGE)}"


class DeepSpeedConfigError(ExplainedError, ValueError, AssertionError):
    """A config that cannot be used. `problems` lists all mistakes."""

    def __init__(self, *args: Any, problems: Iterable[Problem] = ()) -> None:
        super().__init__(*args)
        self.problems = list(problems)

    @classmethod
    def of(cls, problems: Iterable[Problem], source: str = FROM_DICT) -> DeepSpeedConfigError:
        """Return one error for all problems, of the first specific class among them."""
        listed = list(problems)
        count = "1 error" if len(listed) == 1 else f"{len(listed)} errors"
        text = "\n".join(first_lines(listed))
        raised = next((problem.raised_as for problem in listed if problem.raised_as is not None), cls)
        return raised(f"{count} in {named(source)}:\n{text}", problems=listed)


def named(source: str) -> str:
    """Name the config in a sentence: with its file, or just "DeepSpeed config" if a dict or text was passed."""
    return f"DeepSpeed {source}" if source in WITHOUT_FILE else f"DeepSpeed config {source}"


def shown(value: Any) -> str:
    """Return a value as it would appear in JSON, shortened; only the beginning of a long one is formatted."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(_beginning(value))
    return text if len(text) <= 80 else text[:77] + "..."


def _beginning(value: Any) -> Any:
    """Truncate a value to what the first 80 characters of its text need."""
    if isinstance(value, str):
        return value[:100]
    if isinstance(value, dict):
        return {_beginning(key): _beginning(item) for key, item in islice(value.items(), 40)}
    return [_beginning(item) for item in value[:40]] if type(value) is list else value


def cut(text: str, longest: int = MAX_NAME) -> str:
    """Return at most ``longest`` characters of a text, with dots if there are more."""
    return text if len(text) <= longest else text[:longest] + "..."


def first_lines(problems: Sequence[Problem]) -> list[str]:
    """Return a line for each of the first ``MAX_LISTED`` problems, and one that counts the rest."""
    more = len(problems) - MAX_LISTED
    return [f"  {problem}" for problem in problems[:MAX_LISTED]] + [f"  and {more} more"] * (more > 0)


def cut_list(items: Sequence[object]) -> str:
    """Join the items with commas, the first ``MAX_LISTED`` of them, and count the rest."""
    more = f", and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(map(str, items[:MAX_LISTED])) + more


# ------------------------------------------------------------------------------------------------- spelling


def distance(a: str, b: str, limit: int) -> int:
    """Return the Damerau-Levenshtein distance (optimal string alignment: insert, delete, replace, swap neighbours).

    Anything above `limit` is returned as `limit + 1`.
    """
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        before, previous, row = row, before, [i]
        for j, other in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, previous[j - 2] + 1)
            row.append(cost)
        if min(row) > limit:
            return limit + 1
    return min(row[-1], limit + 1)


def _plain(key: str) -> str:
    return key.casefold().replace("-", "_")


def misspelt(key: str, known: Iterable[str]) -> str | None:
    """Return the known key that `key` is a misspelling of: distance 1, or 2 if both have six letters or more."""
    best: tuple[int, str] | None = None
    if len(key) > MAX_NAME:
        return None
    for candidate in known:
        limit = 2 if min(len(key), len(candidate)) >= 6 else 1
        found = distance(_plain(key), _plain(candidate), limit)
        if found <= limit and (best is None or found < best[0]):
            best = (found, candidate)
    return best[1] if best else None


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the known key or value that was probably meant, even if more distant than a misspelling."""
    if len(key) > MAX_NAME:
        return None
    candidates = list(known)
    close = misspelt(key, candidates)
    if close is None:
        plain = {_plain(candidate): candidate for candidate in candidates}
        matches = difflib.get_close_matches(_plain(key), list(plain), n=1, cutoff=0.7)
        close = plain[matches[0]] if matches else None
    return close
