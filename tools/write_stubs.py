"""Write type stubs for the documented paths of release 0.19 that no file of ours lies at.

    python tools/write_stubs.py FOLDER

An import hook answers these paths at run time (`deepspeed/compat/finder.py`), which type checkers do not run.
CMake calls this script when a wheel is built, so that `deepspeed.runtime.zero.partition_parameters` resolves in them
too. The tree keeps no stubs. Only the standard library is imported: a build environment has no torch.
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
    """Return path below the wheel's root -> text, for each documented module without a file, and for packages above."""
    ours = {path: target for path, target in _all_rows() if not _source(path)}
    tabled = {path for path in (*NAMES, *SUBMODULES) if _is_empty(path)}
    modules = {*ours, *tabled}
    modules |= {parent for path in modules for parent in _parents(path) if not _source(parent)}
    packages = {parent for path in modules for parent in _parents(path)}
    packages |= {
        path for path in modules if (file := _source(ours.get(path, path))) and file.stem == "__init__"
    }
    return {_file(path, path in packages): _text(path, ours.get(path)) for path in sorted(modules)}


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


def _is_empty(module: str) -> bool:
    """True if there is no file of ours at that path, or one with nothing but a docstring."""
    file = _source(module)
    return file is None or len(ast.parse(file.read_text(encoding="utf-8")).body) <= 1


def _file(path: str, is_package: bool) -> str:
    return path.replace(".", "/") + ("/__init__.pyi" if is_package else ".pyi")


def _text(path: str, target: str | None) -> str:
    """Return a stub that has the names of `target` and those that the tables add."""
    lines = [f"from {target} import *"] if target else []
    rows = {**NAMES.get(target or "", {}), **NAMES.get(path, {})}
    for name, place in rows.items():
        module, _, renamed = place.partition(":")
        lines.append(f"from {module} import {renamed or name} as {name}")
    lines += [f"from {path} import {name} as {name}" for name in SUBMODULES.get(path, ())]
    return "\n".join(lines) + "\n"


def main(folder: Path) -> None:
    for path, text in stubs().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
