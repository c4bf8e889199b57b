"""Write type stubs for what import hooks answer: documented paths without a file, and names looked up on first use.

    python tools/write_stubs.py FOLDER

Type checkers do not run import hooks (`deepspeed/compat/finder.py`, `__getattr__` of a package). CMake calls this
script when a wheel is built, so that `deepspeed.initialize`, `deepspeed.zero.Init` and
`deepspeed.runtime.zero.partition_parameters` have their types there. The tree keeps no stubs. Only the standard library
is imported: a build environment has no torch.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = runpy.run_path(str(ROOT / "deepspeed" / "compat" / "aliases.py"))
MODULES: Mapping[str, str] = TABLES["MODULES"]
NAMES: Mapping[str, Mapping[str, str]] = TABLES["NAMES"]
SUBMODULES: Mapping[str, tuple[str, ...]] = TABLES["SUBMODULES"]


def stubs() -> dict[str, str]:
    """Return path below the wheel's root -> text: for each documented module without a file, the packages above, files
    of ours without a name of their own to which the tables lead, and the package itself."""
    ours = {path: target for path, target in _all_rows() if not _source(path)}
    tables = (*NAMES, *SUBMODULES)
    tabled = {path for path in (*tables, *(MODULES.get(path, path) for path in tables)) if _is_bare(path)}
    modules = {*ours, *tabled}
    modules |= {parent for path in modules for parent in _parents(path) if not _source(parent)}
    packages = {parent for path in modules for parent in _parents(path)}
    packages |= {
        path for path in modules if (file := _source(ours.get(path, path))) and file.stem == "__init__"
    }
    texts = {_file(path, path in packages): _text(path, ours.get(path)) for path in sorted(modules)}
    return {"deepspeed/__init__.pyi": _root_text(), **texts}


def _all_rows() -> Iterator[tuple[str, str]]:
    """Yield the rows of `MODULES`, and for one that is a package the modules below it."""
    for path, target in MODULES.items():
        yield path, target
        if (package := _source(target)) is None or package.name != "__init__.py":
            continue
        for file in package.parent.rglob("*.py"):
            tail = ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix("__init__")
            below = f"{path}.{tail}".rstrip(".")
            if MODULES.keys().isdisjoint([below, *_parents(below)[: below.count(".") - path.count(".") - 1]]):
                yield below, f"{target}.{tail}".rstrip(".")


def _parents(path: str) -> list[str]:
    """Return the packages above a path, without `deepspeed` itself."""
    return [path.rsplit(".", depth)[0] for depth in range(1, path.count("."))]


def _source(module: str) -> Path | None:
    """Return the file of a module of ours, or None if there is none at that path."""
    place = ROOT.joinpath(*module.split("."))
    candidates = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


def _is_bare(module: str) -> bool:
    """Return whether there is no file of ours at that path, or one that defines and imports no public name."""
    if (file := _source(module)) is None:
        return True
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.ImportFrom(module=source, names=imported) if source != "__future__":
                names = [alias.name for alias in imported if alias.name != "Any"]
            case ast.Assign(targets=targets):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case _:
                names = []
        if any(not name.startswith("_") for name in names):
            return False
    return True


def _file(path: str, is_package: bool) -> str:
    return path.replace(".", "/") + ("/__init__.pyi" if is_package else ".pyi")


def _text(path: str, target: str | None) -> str:
    """Return a stub that has the names of `target` and those that the tables add."""
    lines = [f"from {target} import *"] if target else []
    if target and _is_bare(target):  # which has a stub with the rest
        return lines[0] + "\n"
    documented = [path, *(other for other, ours in MODULES.items() if ours == path)]
    rows: dict[str, str] = {}
    for known in (*([target] if target else []), *documented):
        rows |= NAMES.get(known, {})
    for name, place in rows.items():
        module, _, renamed = place.partition(":")
        lines += _exported(module, renamed or name, name)
    below = dict.fromkeys(name for known in documented for name in SUBMODULES.get(known, ()))
    lines += [f"from {path} import {name} as {name}" for name in below]
    return "\n".join(lines) + "\n"


def _exported(module: str, name: str, exported: str) -> list[str]:
    """Return lines that export a name. To strict checkers, what a stub imports under another name is private."""
    if name == exported:
        return [f"from {module} import {name} as {name}"]
    return [f"from {module} import {name} as _{exported}", f"{exported} = _{exported}"]


def _root_text() -> str:
    """Return the stub of the package: its lazy names, which two tables in its `__init__.py` hold."""
    tables: dict[str, dict[str, str]] = {}
    for node in ast.parse((ROOT / "deepspeed" / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            tables[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    lines = ["import types as types", "from typing import Any", "from deepspeed.version import *"]
    lines.append("from deepspeed.version import __version__ as __version__")
    for name, module in tables["_MODULES"].items():
        package, _, last = module.rpartition(".")
        lines += _exported(package, last, name) if package else []
    lines += [f"from {module} import {name} as {name}" for name, module in tables["_NAMES"].items()]
    lines += ["HAS_TRITON: bool", "dist: Any", ""]
    return "\n".join(lines)


def main(folder: Path) -> None:
    for path, text in stubs().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
