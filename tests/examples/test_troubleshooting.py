"""Every message that the page of troubleshooting quotes is one that the package prints."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.tools.launcher.programs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"(?m)^\| `(.+?)` \| .+ \| .+ \|$", PAGE)
HOLE = "\0"
"""What stands in a text for the fields of an f-string and of a format."""


@functools.cache
def texts() -> list[str]:
    """List all texts of the package, f-strings with holes, joined where they are added up or lie side by side."""
    found = []
    for file in (REPOSITORY / "deepspeed").rglob("*.py"):
        found += [_text(node) for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    return [text for text in found if len(text) > 10]


def _text(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"\{\w*\}|%[sd]", HOLE, text)
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case ast.FormattedValue():
            return HOLE
    return HOLE if isinstance(node, ast.expr) else ""


def is_printed(message: str) -> bool:
    """Return whether a text of the package has the words of a quoted message, with a hole at each `...`."""
    first, *others = message.split("...")
    for text in texts():
        at = text.find(first) + len(first) if first in text else -1
        for part in others:
            hole = text.find(HOLE, at) if at >= 0 else -1
            at = text.find(part, hole) + len(part) if hole >= 0 and part in text[hole:] else -1
        if at >= 0:
            return True
    return False


def test_the_page_has_what_a_newcomer_meets() -> None:
    assert len(MESSAGES) >= 30
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    assert is_printed(message), f"no such message any more: {message}"


def test_an_invented_message_is_not_found() -> None:
    assert not is_printed("scheduler.type=... is unknown: ask ...")
    assert not is_printed("... requires a config: pass config= (dict, path or base64 text)"), "no hole there"
