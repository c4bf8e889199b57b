"""Reading a config: from a dict, a JSON or HJSON file, or urlsafe-base64 JSON text. Nothing is interpreted
here.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed.config.problems import FROM_BASE64, FROM_DICT, named
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

Path = tuple[str | int, ...]


class UnreadableConfig(ValueError):
    """The config is not a file, dict or base64 text, or its text cannot be parsed."""


@dataclass
class ConfigSource:
    """A config as written. `text` is kept so that messages about a key can give line numbers."""

    data: dict[str, Any]
    name: str = FROM_DICT
    text: str | None = None
    _lines: dict[Path, list[int]] | None = field(default=None, repr=False)

    def line(self, path: Path) -> int | None:
        """Line (1-based) of a key in the file, else of its nearest enclosing key; None without a file."""
        if self.text is None:
            return None
        if self._lines is None:
            self._lines = key_lines(self.text)
        while path:
            if path in self._lines:
                return self._lines[path][-1]
            path = path[:-1]
        return None


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> ConfigSource:
    """The config as a new dict, and where it came from. Raises UnreadableConfig."""
    if isinstance(config, Mapping):
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
        with open(name, encoding="utf-8") as file:
            text = file.read()
        return ConfigSource(parse_text(text, name), name, text)
    decoded = _decode_base64(name)
    if decoded is None:
        raise UnreadableConfig(
            f"{name[:200]!r} is not an existing file, and not urlsafe-base64 JSON text either; "
            "a config is a dict, a path to a JSON or HJSON file, or such text"
        )
    return ConfigSource(parse_text(decoded, FROM_BASE64), FROM_BASE64, decoded)


def copy_containers(value: Any) -> Any:
    """A copy of nested dicts and lists; leaves (process groups, dtypes, classes) stay the same objects."""
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


def parse_text(text: str, name: str) -> dict[str, Any]:
    """Parse JSON, else HJSON; refuses an object that holds a key twice, naming the key and the lines."""
    try:
        data = json.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except json.JSONDecodeError as error:
        data = _parse_hjson(text, name, error)
    except ValueError as error:
        raise _duplicates(text, name, error) from None
    if not isinstance(data, dict):
        raise UnreadableConfig(f"{name} holds {type(data).__name__} at top level, expected an object {{...}}")
    return data


def _parse_hjson(text: str, name: str, json_error: json.JSONDecodeError) -> Any:
    place = f"line {json_error.lineno}, column {json_error.colno}: {json_error.msg}"
    try:
        import hjson
    except ImportError:
        raise UnreadableConfig(
            f"{name} is not valid JSON ({place}); if it is meant to be HJSON, install the package 'hjson'"
        ) from None
    try:
        return hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except hjson.HjsonDecodeError:
        raise UnreadableConfig(f"{name} is neither valid JSON ({place}) nor valid HJSON") from None
    except ValueError as error:
        raise _duplicates(text, name, error) from None


def _duplicates(text: str, name: str, error: ValueError) -> UnreadableConfig:
    twice = {path: lines for path, lines in key_lines(text).items() if len(lines) > 1}
    if not twice:
        return UnreadableConfig(f"{error} in {name}")
    places = ", ".join(
        f"'{'.'.join(str(part) for part in path)}' (lines {', '.join(map(str, lines))})"
        for path, lines in twice.items()
    )
    return UnreadableConfig(f"Duplicate keys in {named(name)}: {places}")


# Comments, strings, structure and bare words: enough to follow keys through JSON and HJSON alike.
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
    """An object or list that is open at the current position in the text."""

    is_list: bool
    path: Path
    key: str = ""
    index: int = 0

    @property
    def here(self) -> Path:
        return (*self.path, self.index if self.is_list else self.key)


def key_lines(text: str) -> dict[Path, list[int]]:
    """Path of every key -> the lines (1-based) where it appears; list items are addressed by index.

    Best effort for HJSON, where an unquoted string may contain structural characters.
    """
    lines: dict[Path, list[int]] = {}
    stack: list[_Level] = []
    previous: tuple[str, int] | None = None
    position, line = 0, 1
    for token in _TOKEN.finditer(text):
        line += text.count("\n", position, token.start())
        position = token.start()
        kind, value = token.lastgroup, token.group()
        if kind in ("string", "word"):
            previous = (value[1:-1] if kind == "string" else value, line)
        elif value == ":" and previous and stack and not stack[-1].is_list:
            stack[-1].key = previous[0]
            lines.setdefault(stack[-1].here, []).append(previous[1])
            previous = None
        elif value in "{[":
            stack.append(_Level(value == "[", stack[-1].here if stack else ()))
        elif value in "}]" and stack:
            stack.pop()
        elif value == "," and stack:
            stack[-1].index += 1
    return lines
