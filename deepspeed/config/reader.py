"""Read a config from a dict, a JSON or HJSON file, or urlsafe-base64 JSON text, without interpreting it."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed.base.exceptions import ExplainedError
from deepspeed.config.problems import (
    FROM_BASE64,
    FROM_DICT,
    WITHOUT_FILE,
    ConfigLocation,
    DeepSpeedConfigError,
    Problem,
    cut_list,
    named,
)
from deepspeed.config.section import dict_raise_error_on_duplicate_keys

Path = tuple[str | int, ...]


class UnreadableConfig(ExplainedError, ValueError):
    """The config is not a file, dict or base64 text, or its text cannot be parsed."""


MAX_DEPTH = 100
"""Nesting depth of objects and lists; the deepest documented key is at 8."""


@dataclass
class ConfigSource:
    """A config as written. `text` is kept to locate keys for messages."""

    data: dict[str, Any]
    name: str = FROM_DICT
    text: str | None = None
    not_json: str = ""
    """Place and reason why a text that HJSON's parser accepted is not JSON; empty: it is JSON."""
    _places: dict[Path, list[tuple[int, int]]] | None = field(default=None, repr=False)

    def place(self, path: Path) -> ConfigLocation | None:
        """Locate a key in the text, else its nearest enclosing key; None if there is no text, or neither."""
        if self.text is None:
            return None
        if self._places is None:
            self._places = key_places(self.text)
        while path:
            if path in self._places:
                line, column = self._places[path][-1]
                return ConfigLocation(None if self.name in WITHOUT_FILE else self.name, line, column)
            path = path[:-1]
        return None


class DuplicateKeys(UnreadableConfig):
    """An object of the config has a key twice. ``source`` has the last value of each."""

    def __init__(self, message: str, source: ConfigSource) -> None:
        super().__init__(message)
        self.source = source


def load_source(config: str | os.PathLike[str] | Mapping[str, Any]) -> ConfigSource:
    """Read a config as written. Raises DeepSpeedConfigError."""
    try:
        return read_config(config)
    except UnreadableConfig as error:
        raise DeepSpeedConfigError(str(error), problems=[Problem("config", str(error))]) from None


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> ConfigSource:
    """Read a config into a new dict, with its source. Raises UnreadableConfig."""
    if isinstance(config, Mapping):
        check_depth(config, FROM_DICT)
        return ConfigSource(copy_containers(config))
    if not isinstance(config, (str, os.PathLike)):
        raise UnreadableConfig(
            f"a config is a dict, a path to a JSON or HJSON file, or base64 text, not {type(config).__name__}"
        )
    name = os.fspath(config)
    if os.path.isdir(name):
        raise UnreadableConfig(
            f"{name} is a folder; a config is a dict, a path to a JSON or HJSON file, or base64 text"
        )
    if os.path.exists(name):
        text = text_of(name)
        return parse_text(text, name)
    decoded = _decode_base64(name)
    if decoded is None:
        raise UnreadableConfig(
            f"{name[:200]!r} is neither an existing file nor urlsafe-base64 JSON text; a config is a dict, "
            "a path to a JSON or HJSON file, or such text"
        )
    return parse_text(decoded, FROM_BASE64)


def text_of(name: str, formats: str = "JSON or HJSON") -> str:
    """Read a file. Raises UnreadableConfig."""
    try:
        with open(name, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError:
        raise UnreadableConfig(f"{name} is not text in UTF-8; a config is a {formats} file") from None
    except OSError as error:
        raise UnreadableConfig(f"{name}: {error.strerror or error}") from None


def copy_containers(value: Any) -> Any:
    """Copy nested dicts and lists; leaves (process groups, dtypes, classes) stay the same objects."""
    if isinstance(value, Mapping):
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_containers(item) for item in value)
    return value if not isinstance(value, (set, bytearray)) else copy.copy(value)


def _decode_base64(text: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def check_depth(value: Any, name: str) -> None:
    """Raise UnreadableConfig if objects and lists are nested deeper than ``MAX_DEPTH``, or contain themselves."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, Mapping) else each)
            if isinstance(item, (Mapping, list, tuple))
        ]
        if not level:
            return
    raise _too_deep(name)


def _too_deep(name: str) -> UnreadableConfig:
    return UnreadableConfig(
        f"{named(name)} nests objects or lists more than {MAX_DEPTH} deep; no section needs that: remove "
        "the extra brackets"
    )


def parse_text(text: str, name: str) -> ConfigSource:
    """Parse JSON, else HJSON. Raises UnreadableConfig; DuplicateKeys names the keys and their lines."""
    twice: list[str] = []

    def pairs_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        try:
            return dict_raise_error_on_duplicate_keys(pairs)
        except ValueError as error:
            twice.append(str(error))
            return dict(pairs)

    not_json = ""
    try:
        try:
            data = json.loads(text, object_pairs_hook=pairs_of)
        except json.JSONDecodeError as error:
            twice.clear()
            not_json = f"line {error.lineno}, column {error.colno}: {error.msg}"
            data = _parse_hjson(text, name, not_json, pairs_of)
    except RecursionError:
        raise _too_deep(name) from None
    if not isinstance(data, dict):
        raise UnreadableConfig(f"{name} holds {type(data).__name__} at top level, expected an object {{...}}")
    check_depth(data, name)
    source = ConfigSource(data, name, text, not_json)
    if twice:
        raise DuplicateKeys(_duplicates(text, name, twice[0]), source)
    return source


def _parse_hjson(text: str, name: str, not_json: str, pairs_of: Callable[[list[Any]], dict[str, Any]]) -> Any:
    try:
        import hjson
    except ImportError:
        raise UnreadableConfig(
            f"{name} is not valid JSON ({not_json}); if it is meant to be HJSON, install the package 'hjson'"
        ) from None
    try:
        return hjson.loads(text, object_pairs_hook=pairs_of)
    except hjson.HjsonDecodeError:
        raise UnreadableConfig(f"{name} is neither valid JSON ({not_json}) nor valid HJSON") from None


def _duplicates(text: str, name: str, otherwise: str) -> str:
    twice = {path: places for path, places in key_places(text).items() if len(places) > 1}
    if not twice:
        return f"{otherwise} in {name}"
    listed = [
        f"'{'.'.join(str(part) for part in path)}' (lines {cut_list([line for line, _ in places])})"
        for path, places in twice.items()
    ]
    return f"Duplicate keys in {named(name)}: {cut_list(listed)}"


# Comments, strings, structure and bare words: enough to track keys in both JSON and HJSON. No package on PyPI gives the
# positions of keys in both: json-source-map (1.0.5 of 2022) refuses comments and bare words and keeps only the last of
# two equal keys, json-five reads JSON5, which has no bare values, and hjson, our parser, keeps none.
_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*|//[^\n]*|/\*.*?\*/)
      | (?P<text>'''.*?''')
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<mark>[{}\[\],:])
      | (?P<word>[^\s{}\[\],:"']+)""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(slots=True)
class _Level:
    """An open object or list at the current position in the text."""

    is_list: bool
    path: Path
    key: str = ""
    index: int = 0

    @property
    def here(self) -> Path:
        return (*self.path, self.index if self.is_list else self.key)


def key_places(text: str) -> dict[Path, list[tuple[int, int]]]:
    """Map the path of every key to the (line, column) where it appears, from 1; list items are addressed by index.

    Best effort for HJSON, where an unquoted string may contain structural characters.
    """
    places: dict[Path, list[tuple[int, int]]] = {}
    stack: list[_Level] = []
    previous: tuple[str, int, int] | None = None
    position, line, line_start = 0, 1, 0
    for token in _TOKEN.finditer(text):
        breaks = text.count("\n", position, token.start())
        if breaks:  # otherwise searching one long line would take quadratic time
            line += breaks
            line_start = text.rindex("\n", position, token.start()) + 1
        position = token.start()
        kind, value = token.lastgroup, token.group()
        if kind in ("string", "word"):
            previous = (value[1:-1] if kind == "string" else value, line, position - line_start + 1)
        elif value == ":" and previous and stack and not stack[-1].is_list:
            stack[-1].key = previous[0]
            places.setdefault(stack[-1].here, []).append(previous[1:])
            previous = None
        elif value in "{[":
            stack.append(_Level(value == "[", stack[-1].here if stack else ()))
        elif value in "}]" and stack:
            stack.pop()
        elif value == "," and stack:
            stack[-1].index += 1
    return places
