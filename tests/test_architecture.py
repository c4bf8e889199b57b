"""The house rules that a program can check: imports point downward, nothing is circular, documented names
exist.

The graph is drawn from the source with `ast`. Every import is an arrow, also inside a function and under `if
TYPE_CHECKING:`, as a reader follows them all. `pytest -s` prints the largest files and functions.
"""

from __future__ import annotations

import ast
import fnmatch
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
from deepspeed._compat import later
from deepspeed._compat.finder import our_path
from deepspeed._compat.later_table import LATER
from tests.pool import distributed

ROOT = Path(__file__).resolve().parent.parent

# Lowest first; the first pattern that fits names the layer, so exceptions stand before their folder. A
# module may import from its own layer and from those below.
LAYERS = (
    "accelerator",
    "utils",
    "comm, ops, io",
    "schemas and plan",
    "mechanisms",
    "assemblies",
    "tools",
    "interface",
)
LAYER_OF = {
    "deepspeed": "interface",
    "deepspeed.version": "accelerator",
    "deepspeed.git_version_info": "tools",
    "deepspeed.constants": "accelerator",
    "deepspeed.tool_arguments": "accelerator",
    "deepspeed.utils.exceptions": "accelerator",
    "deepspeed.utils.logging": "accelerator",
    "deepspeed.utils.environment": "accelerator",
    "deepspeed.utils.pin_memory_tracker": "accelerator",
    "deepspeed.accelerator*": "accelerator",
    "deepspeed._compat*": "tools",
    "deepspeed.launcher*": "tools",
    "deepspeed.env_report": "tools",
    "deepspeed.config_tools*": "tools",
    "deepspeed.memory_plan.command": "tools",
    "deepspeed.step_plan.command": "tools",
    "deepspeed.step_plan.calibrate": "tools",
    "deepspeed.step_plan.calibration_rank": "tools",
    "deepspeed.utils.zero_to_fp32": "tools",
    "deepspeed.utils.zero_to_torch": "tools",
    # schemas stand beside the mechanism that they configure
    "deepspeed.ops.sparse_attention*": "comm, ops, io",
    "deepspeed*.config": "schemas and plan",
    "deepspeed.elasticity.elasticity": "schemas and plan",
    "deepspeed*_config": "schemas and plan",
    "deepspeed.runtime.constants": "schemas and plan",
    "deepspeed.config*": "schemas and plan",
    "deepspeed.runtime.compiler": "utils",
    "deepspeed.runtime.engine*": "assemblies",
    "deepspeed.runtime.hybrid_engine": "assemblies",
    "deepspeed.runtime.rollout*": "assemblies",
    "deepspeed.runtime.assembly": "assemblies",
    "deepspeed.runtime.initialize": "assemblies",
    "deepspeed.runtime.pipe.engine*": "assemblies",
    "deepspeed.runtime.pipe.dualpipev": "assemblies",
    "deepspeed.runtime.zenflow.engine": "assemblies",
    "deepspeed.runtime.observers*": "assemblies",
    "deepspeed.inference.quantization*": "mechanisms",
    "deepspeed.inference*": "assemblies",
    "deepspeed.autotuning*": "tools",
    "deepspeed.audit.command": "tools",
    "deepspeed.profiling.timeline.command": "tools",
    "deepspeed.monitor.live.command": "tools",
    "deepspeed.monitor.live.top": "tools",
    "deepspeed.utils*": "utils",
    "deepspeed.comm*": "comm, ops, io",
    "deepspeed.ops*": "comm, ops, io",
    "deepspeed.io*": "comm, ops, io",
    "deepspeed.nvme*": "comm, ops, io",
    "deepspeed.*": "mechanisms",
}


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


def layer(module: str) -> int:
    return LAYERS.index(
        next(name for pattern, name in LAYER_OF.items() if fnmatch.fnmatchcase(module, pattern))
    )


READ_ONLY = {
    "deepspeed.comm.init": {"deepspeed.comm.config", "deepspeed.runtime.config"},
}
"""Upward imports for type checkers: the config is an argument there, of which one section is read."""


def test_imports_point_downward() -> None:
    upward = [
        f"{module} ({LAYERS[layer(module)]}) imports {target} ({LAYERS[layer(target)]})"
        for module, targets in graph().items()
        for target in sorted(targets - (READ_ONLY.get(module, set()) - loads()[module]))
        if target != "deepspeed" and layer(target) > layer(module)
    ]
    assert not upward, "\n".join(upward)


def test_config_takes_from_mechanisms_only_their_sections() -> None:
    """What sections are made of is in `deepspeed/config`, not beside one of the mechanisms."""
    others = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        if module.startswith("deepspeed.config.")
        for target in targets
        if target.startswith("deepspeed.runtime.") and not re.search(r"[._](config|constants)$", target)
    ]
    assert not others, "\n".join(others)


def test_only_tools_use_the_public_interface() -> None:
    """`deepspeed/__init__.py` is the table for outsiders; inside, a name comes from where it is defined."""
    users = [module for module in sources() if "deepspeed" in graph()[module]]
    assert [module for module in users if LAYERS[layer(module)] != "tools"] == []


def test_the_launcher_does_without_the_packages_of_its_ranks() -> None:
    """What is wrong in the environment of a rank is that rank's error, told once, and not the launcher's."""
    of_the_ranks = {
        f"{module} imports {target}"
        for module, targets in loads().items()
        if module.startswith("deepspeed.launcher")
        for target in targets
        if target.startswith(("deepspeed.comm", "deepspeed.runtime"))
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
    from ..utils import logging as ours
    import deepspeed.ops.native
"""
    tree = ast.parse(text)
    module = "deepspeed.runtime.engine"
    run = {"deepspeed.utils.logging", "deepspeed.ops.native"}
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
    """For the eye, under `pytest -s`; nothing is asserted about taste."""
    files = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in sources().items()}
    functions = {
        f"{module}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module in sources()
        for node in ast.walk(tree_of(module))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert files and functions
    for what, sizes in (("files", files), ("functions", functions)):
        print(f"\nten largest {what} of {len(sizes)}:")
        for name, lines in sorted(sizes.items(), key=lambda item: -item[1])[:10]:
            print(f"{lines:6} lines  {name}")


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


# ---------------------------------------------------------------------------------------------- documented
# names


def listed(file: str) -> list[str]:
    lines = (ROOT / "tests" / "data" / file).read_text().splitlines()
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


def is_refused(found: Any) -> bool:
    return isinstance(found, later._Later) or getattr(found, "__doc__", None) == later.DOC


@pytest.mark.parametrize("path", [line for line in listed("surface_due.txt") if " " not in line])
def test_a_name_that_is_due_resolves(path: str) -> None:
    assert not is_refused(resolve(path))


@pytest.mark.parametrize("path", listed("surface_later.txt"))
def test_a_name_that_comes_later_imports(path: str) -> None:
    resolve(path)


def test_no_stand_in_hides_a_name_that_exists() -> None:
    """A line of later_table.py is forgotten once its module defines the name."""
    forgotten = [
        f"{module}.{name}"
        for module in LATER
        if module in sources()
        for name in later.names(module)
        if name in (defined := vars(importlib.import_module(module)))
        and defined[name] is not later.make(module, name)
    ]
    assert not forgotten


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
