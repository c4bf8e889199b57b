"""The house rules that a program can check: imports point downward, nothing is circular, documented names
exist.

The graph is drawn from the source with `ast`. Every import is an arrow, also inside a function and under `if
TYPE_CHECKING:`, as a reader follows them all. `pytest -s` prints the largest files and functions.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch

import deepspeed
from deepspeed.compat.finder import our_path
from tests.pool import distributed

ROOT = Path(__file__).resolve().parent.parent

# The rooms, lowest first: folders directly under `deepspeed/`. A module may import from its own room and from those
# below it; what each is for stands in its `__init__.py` and in docs/architecture.md.
ROOMS = (
    "base",
    "ops",
    "config",
    "comm",
    "optim",
    "data",
    "observe",
    "checkpoint",
    "zero",
    "transforms",
    "parallel",
    "compression",
    "planning",
    "inference",
    "engine",
    "tools",
    "compat",
)
MAX_LINES = 0.20
"""Share of all lines that one room may have."""
MAX_FILES = 25
"""Modules in one folder."""
MAX_SHARED_NAMES = 13
"""Class names that more than one class has: documented ones, protocols of a class elsewhere, private helpers."""
MAX_LINES_OF_A_FUNCTION = 70
"""With its signature and docstring."""


# ---------------------------------------------------------------------------------------------- the graph


@functools.cache
def sources() -> dict[str, Path]:
    """Module name -> file."""
    found = {}
    for path in sorted((ROOT / "deepspeed").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text(encoding="utf-8"))


@functools.cache
def graph() -> dict[str, set[str]]:
    """Module -> the modules of ours that it names in an import, wherever that stands: what a reader has to know."""
    return {module: _imported(module, ast.walk(tree_of(module))) for module in sources()}


@functools.cache
def loads() -> dict[str, set[str]]:
    """Module -> what importing its imports runs: also the packages on the way, but those it is in itself."""
    return {
        module: {
            reached
            for target in _imported(module, _runtime_nodes(tree_of(module)))
            for reached in (
                target,
                *(target.rsplit(".", depth)[0] for depth in range(1, target.count(".") + 1)),
            )
            if reached in sources() and not f"{module}.".startswith(f"{reached}.")
        }
        for module in sources()
    }


def _imported(module: str, nodes: Iterable[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {our_path(alias.name) or alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(module, node)
            paths = {alias.name: f"{base}.{alias.name}" for alias in node.names}
            found |= {path if path in sources() else base for path in paths.values()}
    return found & sources().keys()


def _base_of(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    up = node.level - (sources()[module].name == "__init__.py")
    parts = module.split(".")[: module.count(".") + 1 - up]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _runtime_nodes(child)


def room(module: str) -> int | None:
    """Return the position of a module's room in `ROOMS`; None for `deepspeed` itself and `deepspeed.version`."""
    name = module.partition(".")[2].partition(".")[0]
    return None if name in ("", "version") else ROOMS.index(name)


def test_imports_point_downward() -> None:
    upward = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        for target in sorted(targets)
        if (here := room(module)) is not None and (there := room(target)) is not None and there > here
    ]
    assert not upward, "\n".join(upward)


def test_every_folder_is_a_room() -> None:
    folders = {path.name for path in (ROOT / "deepspeed").iterdir() if any(path.glob("*.py"))}
    assert folders == set(ROOMS)


def test_no_room_holds_most_of_the_code() -> None:
    lines = dict.fromkeys(ROOMS, 0)
    for module, path in sources().items():
        if (position := room(module)) is not None:
            lines[ROOMS[position]] += len(path.read_text(encoding="utf-8").splitlines())
    total = sum(lines.values())
    print("".join(f"\n{count:6} lines  {name}" for name, count in lines.items()))
    assert {name: count for name, count in lines.items() if count > MAX_LINES * total} == {}


def test_no_folder_holds_too_many_modules() -> None:
    folders: dict[Path, int] = {}
    for path in sources().values():
        folders[path.parent] = folders.get(path.parent, 0) + (path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): n for folder, n in folders.items() if n > MAX_FILES} == {}


def test_a_class_has_its_name_to_itself() -> None:
    """A name says what the class is, so that one search finds it."""
    owners = collections.defaultdict(list)
    for module in sources():
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("__"):
                owners[node.name].append(module)
    shared = {name: modules for name, modules in owners.items() if len(modules) > 1}
    assert len(shared) <= MAX_SHARED_NAMES, shared


def test_only_tools_use_the_public_interface() -> None:
    """`deepspeed/__init__.py` is the table for outsiders; inside, a name comes from where it is defined."""
    users = [module for module in sources() if "deepspeed" in graph()[module]]
    assert [
        module for module in users if not module.startswith(("deepspeed.tools.", "deepspeed.compat."))
    ] == []


def test_the_launcher_does_without_the_packages_of_its_ranks() -> None:
    """An invalid environment of a rank is that rank's error, reported once, and not the launcher's."""
    of_the_ranks = {
        f"{module} imports {target}"
        for module, targets in loads().items()
        if module.startswith("deepspeed.tools.launcher")
        for target in targets
        if (position := room(target)) is not None and ROOMS.index("config") < position < ROOMS.index("tools")
    }
    assert not of_the_ranks, "\n".join(sorted(of_the_ranks))


@pytest.mark.parametrize("arrows", [graph, loads], ids=["for a reader", "at run time"])
def test_there_are_no_circles(arrows: Callable[[], dict[str, set[str]]]) -> None:
    assert circles(arrows()) == []


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    found = networkx.strongly_connected_components(networkx.DiGraph(arrows))
    return [sorted(circle) for circle in found if len(circle) > 1]


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "c"}}) == [["b", "c"]]


def test_arrows_of_every_kind_are_seen() -> None:
    """In functions and for type checkers, absolute and relative; what is for type checkers does not run."""
    text = """
if TYPE_CHECKING:
    from deepspeed.comm import mesh
def later():
    from ..base import logging as ours
    import deepspeed.ops.native
"""
    tree = ast.parse(text)
    module = "deepspeed.engine.engine"
    run = {"deepspeed.base.logging", "deepspeed.ops.native"}
    assert _imported(module, ast.walk(tree)) == run | {"deepspeed.comm.mesh"}
    assert _imported(module, _runtime_nodes(tree)) == run


# ---------------------------------------------------------------------------------------------- other rules


def test_no_unix_only_import_at_module_level() -> None:
    unix_only = {"fcntl", "grp", "pwd", "resource", "termios", "pty", "tty", "syslog", "readline"}
    found = [
        f"{module}: {name}"
        for module in sources()
        for node in tree_of(module).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
        if name.split(".")[0] in unix_only
    ]
    assert not found


def test_no_star_imports() -> None:
    found = [
        module
        for module in sources()
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]
    assert not found


def test_the_largest_files_and_functions() -> None:
    """Sizes under `pytest -s`; a function that does not fit on a page is cut where one thought ends."""
    files = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in sources().items()}
    functions = {
        f"{module}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module in sources()
        for node in ast.walk(tree_of(module))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    for what, sizes in (("files", files), ("functions", functions)):
        print(f"\nten largest {what} of {len(sizes)}:")
        for name, lines in sorted(sizes.items(), key=lambda item: -item[1])[:10]:
            print(f"{lines:6} lines  {name}")
    assert {name: lines for name, lines in functions.items() if lines > MAX_LINES_OF_A_FUNCTION} == {}


def test_what_needs_client_libraries_runs_with_them() -> None:
    """`make test` skips it, and would do so for ever."""
    lists = (ROOT / "Makefile").read_text()
    needing = re.compile(r"""importorskip\(["'](transformers|peft|accelerate|trl|datasets|openai)\b""")
    files = (path for path in (ROOT / "tests").rglob("test_*.py") if needing.search(path.read_text()))
    names = [str(path.relative_to(ROOT)) for path in files]
    assert [name for name in names if not name.startswith("tests/clients/") and name not in lists] == []


def test_files_named_in_documents_exist() -> None:
    folders = ("deepspeed", "tests", "docs", "tools", "examples", "benchmarks", "csrc")
    generated = ("examples/pretrain_gpt/out",)
    named = {
        (document.name, path)
        for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
        for path in re.findall(r"`([\w.-]+/[\w./-]+)`", document.read_text(encoding="utf-8"))
        if path.split("/")[0] in folders and not path.startswith(generated)
    }
    assert [name for name in sorted(named) if not (ROOT / name[1]).exists()] == []


def test_modules_and_names_of_the_glossary_exist() -> None:
    """Yield, for each row, the paths in its last column, and `Class.method` anywhere in it."""
    rows = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| *")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources().values())
    package = ROOT / "deepspeed"
    where = [path for row in rows for path in re.findall(r"`([\w/.]+)[`:]", row.split("|")[-2])]
    paths = [path.removeprefix("deepspeed/") for path in where]
    names = [name for row in rows for name in re.findall(r"\b([A-Z]\w+)\.([a-z]\w+)`", row)]
    assert [path for path in paths if not (package / path).exists()] == []
    assert [
        pair
        for pair in names
        if not re.search(rf"\nclass {pair[0]}\b", code) or f"def {pair[1]}(" not in code
    ] == []
    assert len(paths) > 40 and len(names) > 3


# ---------------------------------------------------------------------------------------------- documented
# names


def listed(file: str) -> list[str]:
    lines = (ROOT / "tests" / "files" / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def resolve(path: str) -> Any:
    """The object at a dotted path, by importing as far as there are modules and reading attributes from
    there."""
    module, attributes = path, []
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
    for attribute in attributes:
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize("path", [line for line in listed("surface_due.txt") if " " not in line])
def test_a_name_that_is_due_resolves(path: str) -> None:
    assert resolve(path) is not None


@distributed(world_size=1)
def test_attributes_that_clients_read_on_a_live_engine() -> None:
    engine, optimizer, _, _ = deepspeed.initialize(
        model=torch.nn.Linear(4, 4),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    )
    owners = {"engine": engine, "optimizer": optimizer}
    rows = [line.split() for line in listed("surface_due.txt") if " " in line]
    missing = [f"{owner} {name}" for owner, name in rows if not hasattr(owners[owner], name)]
    assert not missing
    assert type(engine) is resolve("deepspeed.runtime.engine.DeepSpeedEngine")
    # Lightning takes what has these for an optimizer
    assert not any(hasattr(engine, name) for name in ("param_groups", "defaults", "state"))
