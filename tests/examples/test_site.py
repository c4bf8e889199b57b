"""The documentation as a site: what it lists exists, and the pages that tell of the package agree with it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from functools import reduce

import pytest

from tests.tools.launcher.programs import REPOSITORY

DOCS = REPOSITORY / "docs"
SITE = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
LISTED = re.findall(r"^ +- .*?([\w/]+\.md)$", SITE, flags=re.M)


def test_every_page_is_listed_once():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(LISTED) == sorted(pages)


@pytest.mark.parametrize("page", sorted(DOCS.glob("api/*.md")), ids=lambda path: path.stem)
def test_what_the_reference_lists_exists_and_is_documented(page):
    names = re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), flags=re.M)
    assert names
    for name in names:
        module, found = _split(name)
        value = reduce(getattr, found, module)
        assert (value.__doc__ or "").strip(), name


def _split(name: str):
    """The module and the attributes that lead from it to the object."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            return importlib.import_module(".".join(parts[:count])), parts[count:]
        except ModuleNotFoundError:
            continue
    raise AssertionError(name)


def test_diagrams_are_those_of_the_tool():
    tool = REPOSITORY / "tools" / "draw_diagrams.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    for path in (DOCS / "images").glob("*.svg"):
        assert f"](images/{path.name})" in shown


def test_installation_tells_every_extra():
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(
        r"^([\w-]+) = \[", project.split("[project.optional-dependencies]")[1].split("\n[")[0], re.M
    )
    page = (DOCS / "installation.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", page, flags=re.M)) == sorted(extras)
