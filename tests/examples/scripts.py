"""Loads the script of an example as a module."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.tools.launcher.programs import REPOSITORY


def script(folder: str, name: str = "train") -> ModuleType:
    """The module ``examples/<folder>/<name>.py``; ``sys.path`` and ``sys.modules`` are as before."""
    path = REPOSITORY / "examples" / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        sys.path.insert(0, str(path.parent))  # as for a script
        sys.modules[spec.name] = module  # where dataclasses look
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
        sys.modules.pop(spec.name, None)
    return module
