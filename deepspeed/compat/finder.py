"""The import hook behind `aliases.py`.

It handles the module paths in its tables:

- a row of `MODULES`: the import returns our module object itself;
- a module of ours with further names in the tables: loaded as usual, it looks up missing names there;
- a path that is only in the tables: an empty module that looks up all names there.

Removed names raise an error that names the replacement (`absent.py`).

Packages of ours also import their submodules on attribute access: clients write
`deepspeed.elasticity.config.ElasticityError` after only `import deepspeed`.
"""

from __future__ import annotations

import importlib
import importlib.util
import opcode
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from deepspeed.compat.aliases import MODULES, NAMES, SUBMODULES

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # importlib.abc imports `tempfile` and `zipfile`, which are not needed here
    Loader = MetaPathFinder = object


def install() -> None:
    """Put the finder first in `sys.meta_path`, once."""
    if not any(isinstance(finder, DocumentedPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, DocumentedPaths())


def our_path(documented: str) -> str | None:
    """Return our path of a documented module, if it or a parent package is a row of `MODULES`; else None."""
    head, tail = documented, ""
    while "." in head:
        if head in MODULES:
            return MODULES[head] + tail
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    return None


_TABLED: dict[str, list[str]] = {}
for _path in dict.fromkeys([*NAMES, *SUBMODULES]):
    _TABLED.setdefault(our_path(_path) or _path, []).append(_path)
# Parents of documented paths; some exist only as such: `deepspeed.runtime` for `deepspeed.runtime.engine`.
_PACKAGES = {
    path.rsplit(".", depth)[0]
    for path in (*NAMES, *SUBMODULES, *MODULES, *_TABLED)
    for depth in range(1, path.count("."))
}
_DOCUMENTED: dict[str, list[str]] = {}
for _path, _ours in MODULES.items():
    _DOCUMENTED.setdefault(_ours, []).append(_path)


def documented_paths(module: str) -> list[str]:
    """Return the paths of `module` in the tables, including its own name."""
    return list(dict.fromkeys([module, *_TABLED.get(module, ()), *_DOCUMENTED.get(module, ())]))


def lookup(module: str, name: str) -> Any:
    """Return a documented name that `module` does not define itself.

    AttributeError: no table has it; the message names the replacement if `absent.INSTEAD` has one.
    """
    for path in documented_paths(module):
        if target := NAMES.get(path, {}).get(name):
            ours, _, renamed = target.partition(":")
            return getattr(importlib.import_module(ours), renamed or name)
        if name in SUBMODULES.get(path, ()):
            return importlib.import_module(f"{path}.{name}")
    advice = "" if name.startswith("__") else _instead(module, name)  # the import system looks up such names
    raise AttributeError(f"module {module!r} has no attribute {name!r}{advice}")


def _instead(module: str, name: str) -> str:
    """Return the advice for a name that `module` lacks, to append to an error; empty if there is none."""
    if name.startswith("__"):  # looked up by Python itself, also while `absent` is being imported
        return ""
    from deepspeed.compat.absent import instead

    found = (
        instead(f"{path}.{name}") for path in (*_also_documented(module), *reversed(documented_paths(module)))
    )
    return next(filter(None, found), "")


def _also_documented(module: str) -> list[str]:
    """Return the documented paths of a module below a row of `MODULES`."""
    ours, tail = module, ""
    while "." in ours and ours not in _DOCUMENTED:
        ours, _, last = ours.rpartition(".")
        tail = f".{last}{tail}"
    return [path + tail for path in _DOCUMENTED.get(ours, ())]


class DocumentedPaths(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a path below `deepspeed`, None if unknown; ModuleNotFoundError: removed, with advice."""
        if not fullname.startswith("deepspeed."):
            return None
        spec = self._spec(fullname, path, target)
        if spec is None and (hint := _instead(*fullname.rsplit(".", 1))):
            raise ModuleNotFoundError(f"No module named {fullname!r}{hint}", name=fullname)
        return spec

    def _spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        if ours := our_path(fullname):
            return self._same_module(fullname, ours)
        real = self._real_spec(fullname, path, target)
        in_a_table = fullname in _TABLED or fullname in _PACKAGES
        if real is None or real.origin is None:  # nothing, or a folder without __init__.py
            if not in_a_table:
                return real
            tabled = ModuleSpec(fullname, _OnlyTabled(), is_package=True)
            if real is not None:
                tabled.submodule_search_locations = real.submodule_search_locations
            return tabled
        is_package = bool(real.submodule_search_locations)
        if real.loader is not None and (in_a_table or is_package or _also_documented(fullname)):
            real.loader = _WithTabledNames(real.loader)
        return real

    def _same_module(self, fullname: str, ours: str) -> ModuleSpec | None:
        try:
            real = importlib.util.find_spec(ours)
        except ModuleNotFoundError:  # a parent package is not ours
            return None
        if real is None:
            return None
        is_package = real.submodule_search_locations is not None
        return ModuleSpec(fullname, _SameModule(ours), origin=real.origin, is_package=is_package)

    def _real_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or (find_spec := getattr(finder, "find_spec", None)) is None:
                continue
            if spec := find_spec(fullname, path, target):
                return spec
        return None


class _SameModule(Loader):
    """Loads a documented path as our module object, which keeps its own name and spec."""

    def __init__(self, ours: str) -> None:
        self.ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.ours)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own_spec  # the import system has set the documented path's spec

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of our module, to run it under the documented path (``python -m``)."""
        spec = importlib.util.find_spec(self.ours)
        return spec.loader.get_code(self.ours) if spec and spec.loader else None  # type: ignore[attr-defined]


class _OnlyTabled(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Documented module whose names are elsewhere."
        _ask_tables(module)


class _WithTabledNames(Loader):
    """Wraps the loader of one of our modules, and delegates other attributes to it."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.real.exec_module(module)
        _ask_tables(module)


def submodule(package: ModuleType, name: str) -> ModuleType | None:
    """Import and return the submodule of that name, also by a documented path of the package; None if there is none."""
    if name.startswith("_") or not hasattr(package, "__path__"):
        return None
    for path in (f"{parent}.{name}" for parent in documented_paths(package.__name__)):
        if exists(path):
            return importlib.import_module(path)
    return None


def exists(path: str) -> bool:
    """Return whether a module can be imported under this path."""
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False


def _ask_tables(module: ModuleType) -> None:
    own = vars(module).get("__getattr__")

    def missing(name: str) -> Any:
        refusal: AttributeError | None = None
        if own is not None:
            try:
                return own(name)
            except AttributeError as error:
                refusal = error
        try:
            value = lookup(module.__name__, name)
        except AttributeError as error:
            value = submodule(module, name)
            if value is None:
                # The module's own error, unless it only says that there is no such name.
                refusal = refusal if refusal and not str(error).startswith(str(refusal)) else error
                if _imports_a_name(sys._getframe(1)):  # the import's own error would have no advice
                    raise ImportError(
                        f"cannot import name {name!r}: {refusal}", name=module.__name__
                    ) from None
                raise refusal from None
        setattr(module, name, value)
        return value

    vars(module)["__getattr__"] = missing


def _imports_a_name(frame: FrameType) -> bool:
    """Return whether the frame executes `from module import name`."""
    return frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]
