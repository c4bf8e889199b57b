"""Errors of the package lead to the page that explains them."""

from __future__ import annotations

import ast
import functools
import pickle
import re
import sys
import traceback
from pathlib import Path

import pytest

from deepspeed.base.exceptions import ExplainedError, NoOptimizerError
from deepspeed.base.tool_arguments import exit_quietly
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.config.problems import DeepSpeedConfigError

ROOT = Path(__file__).resolve().parents[2]
ANCHORS = re.findall(r'<a id="(\w+)"></a>`(\w+)`', (ROOT / "docs" / "troubleshooting.md").read_text())

CAUGHT = set(
    "AioFailure BatchError BudgetTooSmall CannotCount RecordInUse NoSuchFunction NotFiniteError NotChunkable "
    "NotPerToken PackedWeightsError Refused TraceError".split()
)
"""Classes between two of our own functions: the caller makes an answer or another error of each."""


@functools.cache
def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "deepspeed").rglob("*.py")]


@functools.cache
def bases() -> dict[str, set[str]]:
    """Return all classes of the package by name, with the names of their bases."""
    found: dict[str, set[str]] = {}
    for node in (node for tree in trees() for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            found.setdefault(node.name, set()).update(ast.unparse(base).split(".")[-1] for base in node.bases)
    return found


def above(name: str) -> set[str]:
    return {name}.union(*(above(base) for base in bases().get(name, ()) if base != name))


def errors() -> set[str]:
    """Return the names of all public classes of errors."""
    import builtins

    def is_error(name: str) -> bool:
        kind = getattr(builtins, name, None)
        return isinstance(kind, type) and issubclass(kind, Exception)

    return {name for name in bases() if name[0] != "_" and any(map(is_error, above(name)))}


def test_every_class_that_a_user_can_meet_is_explained() -> None:
    assert len(errors()) > 50
    explained = {name for name in errors() if "ExplainedError" in above(name)} - {"ExplainedError"}
    assert sorted(errors() - explained - {"ExplainedError"}) == sorted(CAUGHT)
    assert sorted(name for _, name in ANCHORS) == sorted(explained)
    assert all(anchor == name.lower() for anchor, name in ANCHORS)


@pytest.mark.parametrize("name", sorted(CAUGHT))
def test_the_others_are_caught_by_name(name: str) -> None:
    nodes = [node for tree in trees() for node in ast.walk(tree)]
    handlers = [
        ast.unparse(node.type)
        for node in nodes
        if isinstance(node, ast.ExceptHandler) and node.type is not None
    ]
    handlers += [  # of a web application
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".exception_handler")
    ]
    assert any(re.search(rf"\b{name}\b", each) for each in handlers)


@pytest.mark.parametrize("kind", [NoOptimizerError, CheckpointNotFoundError, DeepSpeedConfigError])
def test_a_traceback_ends_with_the_place(kind: type[ExplainedError]) -> None:
    error = kind("no such thing")
    place = f"explained in docs/troubleshooting.md#{kind.__name__.lower()}"
    assert str(error) == "no such thing" and error.__notes__ == [place]
    error.__notes__.append("and more")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__notes__) == (kind, str(error), [place, "and more"])
    assert kind("another").__notes__ == [place], "of its own"
    if sys.version_info >= (3, 11):
        error.add_note("and yet more")
        shown = "".join(traceback.format_exception(error)).splitlines()
        assert shown[-3:] == [place, "and more", "and yet more"]


def test_a_tool_prints_message_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    @exit_quietly("ds thing", OSError)
    def main(error: Exception) -> int:
        raise error

    assert main(CheckpointError("half a file")) == 2
    place = "explained in docs/troubleshooting.md#checkpointerror"
    assert capsys.readouterr().err == f"ds thing: half a file\n{place}\n"
    assert main(OSError("no disk")) == 2
    assert capsys.readouterr().err == "ds thing: no disk\n"
    with pytest.raises(LookupError):
        main(LookupError("a mistake of ours"))
