"""Stubs for documented paths, as the build of a wheel writes them (`tools/write_stubs.py`)."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import deepspeed
from deepspeed.compat.aliases import MODULES, NAMES
from tests.test_documented_names import DATA

ROOT = Path(__file__).resolve().parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_stubs", ROOT / "tools" / "write_stubs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_file(module: str, stubs: dict[str, str]) -> bool:
    place = module.replace(".", "/")
    ends = (".py", ".pyi", "/__init__.py", "/__init__.pyi")
    return any(place + end in stubs or (ROOT / (place + end)).is_file() for end in ends)


def test_every_documented_module_has_a_file_in_the_wheel() -> None:
    stubs = load().stubs()
    sections = (DATA / "documented_names.txt").read_text().splitlines()
    documented = [line[1:-1] for line in sections if line.startswith("[deepspeed.")]
    assert len(documented) > 50
    assert [module for module in (*MODULES, *NAMES, *documented) if not is_file(module, stubs)] == []
    assert not any((ROOT / path).exists() for path in stubs), "stubs are not kept in the tree"


def test_each_stub_imports_from_what_exists() -> None:
    stubs = load().stubs()
    for path, text in stubs.items():
        for node in ast.parse(text, path).body:
            if isinstance(node, ast.Assign):
                continue  # exports what has another name where it lives
            if path == "deepspeed/__init__.pyi" and not isinstance(node, ast.ImportFrom):
                continue  # `types`, which is Python's, and two names that are computed
            assert isinstance(node, ast.ImportFrom) and node.module
            ours = not node.module.startswith("deepspeed") or is_file(node.module, stubs)
            assert ours, f"{path} imports {node.module}"


STRICT = {
    "pyright": ["--pythonpath", sys.executable],
    "mypy": ["--strict", "--python-executable", sys.executable, "--follow-imports=silent"],
}


@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.slow), "pyright"])
def test_a_strict_type_checker_accepts_a_users_script(tmp_path: Path, checker: str) -> None:
    """`users_script.py` trains, reads state, saves and serves; and every name of the reference pages is known."""
    command = shutil.which(checker, path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip(f"{checker} is not installed")
    shutil.copytree(
        ROOT / "deepspeed", tmp_path / "deepspeed", ignore=shutil.ignore_patterns("lib", "__pycache__")
    )
    load().main(tmp_path)
    shutil.copy(ROOT / "tests" / "users_script.py", tmp_path / "users_script.py")
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    names = [path.rpartition(".") for path in re.findall(r"(?m)^::: (\S+)", pages)]
    assert len(names) > 50
    lines = ["# pyright: strict", "import deepspeed"]
    lines += [
        f"from {module} import {name} as name_{number}" for number, (module, _, name) in enumerate(names)
    ]
    lines += [f"print(name_{number})" for number in range(len(names))]
    lines += [f"print(deepspeed.{name})" for name in deepspeed.__all__ if name not in ("dist", "types")]
    (tmp_path / "names.py").write_text("\n".join(lines))
    found = subprocess.run(
        [command, *STRICT[checker], "users_script.py", "names.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout


def test_pyright_resolves_documented_paths(tmp_path: Path) -> None:
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("pyright is not installed")
    (tmp_path / "deepspeed").symlink_to(ROOT / "deepspeed")
    load().main(tmp_path / "typings")
    (tmp_path / "client.py").write_text(
        "from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus\n"
        "from deepspeed.checkpoint import DeepSpeedCheckpoint\n"
        "from deepspeed.inference.v2.engine_factory import HuggingFaceCheckpointEngine, build_hf_engine\n"
        "from deepspeed.inference.v2.scheduling_utils import SchedulingError, SchedulingResult\n"
        "reveal_type(GatheredParameters)\n"
    )
    found = subprocess.run([pyright, "client.py"], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert "type[GatheredParameters]" in found.stdout
