"""Names of the optimizers and schedules of the installed torch, and of their arguments.

`ds_check` needs no more of torch, whose import takes seconds. So they are read from torch's source, unless torch is
loaded; then the classes themselves are asked, to which a script may have added its own.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

OPTIMIZERS, SCHEDULES = "torch.optim", "torch.optim.lr_scheduler"
BASES = {OPTIMIZERS: "Optimizer", SCHEDULES: "LRScheduler"}


def classes_of(module: str) -> set[str]:
    """Return the names of the optimizers or schedules in `module`, which is one of `BASES`."""
    loaded = _loaded(module)
    if loaded is None:
        return _public_classes(module) - {BASES[module]}
    base = getattr(loaded, BASES[module])
    return {
        name
        for name, value in vars(loaded).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and name[0] != "_"
    }


def arguments_of(module: str, name: str) -> list[str]:
    """Return the names of what the constructor of a class of `classes_of(module)` takes, in order."""
    found = _constructor(module, name) if _loaded(module) is None else None
    if found is not None:
        return found
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def _loaded(module: str) -> ModuleType | None:
    """Return the module if it is loaded, or if its source is not installed; None: read the source."""
    if module in sys.modules or _file(module) is None:
        return importlib.import_module(module)
    return None


def _file(module: str) -> Path | None:
    """Find the source of a module without importing it or its package."""
    root, *parts = module.split(".")
    spec = importlib.util.find_spec(root)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder).joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


@functools.cache
def _tree(module: str) -> ast.Module:
    file = _file(module)
    return ast.parse(file.read_bytes() if file else b"")


def _imports(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name here, module, name there) of each `from ... import ...`."""
    package = module if module == OPTIMIZERS else module.rpartition(".")[0]  # all others are no packages
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom):
            source = f"{package}.{node.module}" if node.level else node.module or ""
            yield from ((alias.asname or alias.name, source, alias.name) for alias in node.names)


def _public_classes(module: str) -> set[str]:
    """Find the classes that a module defines, or a package takes from its modules."""
    own = {node.name for node in _tree(module).body if isinstance(node, ast.ClassDef)}
    taken = {name for name, source, _ in _imports(module) if source.startswith(f"{module}.")}
    return {name for name in own | taken if name[0].isupper()}


def _constructor(module: str, name: str) -> list[str] | None:
    """Find the arguments of a class in the source, after `self`; None if it is not there."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    return [argument.arg for argument in _in_order(item.args)][1:]
            inherited = (_constructor(module, base.id) for base in node.bases if isinstance(base, ast.Name))
            return next(inherited, None)
    for here, source, there in _imports(module):
        if here == name and source.startswith("torch."):
            return _constructor(source, there)
    return None


def _in_order(of: ast.arguments) -> Iterator[ast.arg]:
    yield from (*of.posonlyargs, *of.args)
    yield from filter(None, (of.vararg, *of.kwonlyargs, of.kwarg))
