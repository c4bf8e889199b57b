"""Each diff of docs/recipes applies to this tree, alone and after the others, and the tests that it adds pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "docs/recipes").glob("*.diff"))
MAX_LINES = 60
# An editable installation resolves every import of the package to this tree, before any path is searched.
NOT_EDITABLE = (
    "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
)


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def apply(recipe: Path, folder: Path, *options: str) -> None:
    """GIT_CEILING_DIRECTORIES: a checkout around ``folder`` does not count. Git replaces a file, so that what is linked
    stays as it is."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", *options, str(recipe)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_every_recipe_applies_and_passes_its_tests(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    unused = shutil.ignore_patterns("__pycache__", "files", "cells")
    for part in ("deepspeed", "tests"):
        shutil.copytree(ROOT / part, copy / part, copy_function=link_or_copy, ignore=unused)
    for file in ("pyproject.toml", "docs/config.md"):
        (copy / file).parent.mkdir(exist_ok=True)
        link_or_copy(str(ROOT / file), str(copy / file))
    for recipe in RECIPES:
        apply(recipe, copy, "--check")
    for recipe in RECIPES:
        apply(recipe, copy)
    added = [
        path for recipe in RECIPES for path in re.findall(r"(?m)^\+\+\+ b/(tests/.*)$", recipe.read_text())
    ]
    (copy / "sitecustomize.py").write_text(NOT_EDITABLE)
    checks = "import sys, deepspeed, pytest; assert deepspeed.__file__.startswith(sys.argv[1]), deepspeed.__file__; "
    command = [
        "-c",
        f"{checks}sys.exit(pytest.main(sys.argv[2:]))",
        str(copy),
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, *command, *added],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_short_and_named_in_the_guide(recipe: Path) -> None:
    assert len(recipe.read_text().splitlines()) < MAX_LINES
    assert f"docs/recipes/{recipe.name}" in (ROOT / "CONTRIBUTING.md").read_text()
