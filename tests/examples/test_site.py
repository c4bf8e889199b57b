"""The documentation as a site: what it lists exists, and the pages that tell of the package agree with it."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from functools import reduce

import pytest

import deepspeed
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


OF_OLD_SCRIPTS = set(
    "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable default_inference_config dist is_compile_supported logger "
    "replace_transformer_layer revert_transformer_layer set_autotp_mode".split()
)
"""Public, but nothing to write new scripts with; their docstrings say what they do."""


def test_the_reference_has_every_public_function_and_class():
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("api/*.md"))
    listed = re.findall(r"^ +heading: deepspeed\.(\w+)$", pages, flags=re.M)
    public = {name for name in deepspeed.__all__ if callable(getattr(deepspeed, name))}
    assert sorted(public - OF_OLD_SCRIPTS - set(listed)) == []
    assert set(deepspeed.__all__) >= OF_OLD_SCRIPTS


def test_a_page_says_first_whom_it_is_for():
    for page in LISTED:
        text = re.sub(r"<!--.*?-->\n", "", (DOCS / page).read_text(encoding="utf-8"))
        first = re.split(r"\n{2,}", text.strip())[1]
        assert re.match(r"For (anyone|those) who ", first), page


def test_links_of_pages_stay_within_the_site():
    """As mkdocs asks for with `--strict`; other files of the repository are named in code."""
    for page in LISTED:
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (DOCS / page).read_text(encoding="utf-8"))
        inside = [
            DOCS in (DOCS / page).parent.joinpath(link).resolve().parents for link in links if ":" not in link
        ]
        assert all(inside), page


def test_the_site_names_its_release():
    assert f"\ncopyright: Documentation of release {deepspeed.__version__}\n" in SITE


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


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
def test_the_search_works_from_files(tmp_path):
    """On a site of two pages with the settings of ours, without a server and with no address but its own."""
    pytest.importorskip("material")
    settings = SITE.split("\nextra:")[1].split("\n\n")[0]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# One\n\nShards of weights.\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\nMoments of gradients.\n")
    shutil.copytree(DOCS / "javascripts", tmp_path / "docs" / "javascripts")
    (tmp_path / "mkdocs.yml").write_text(
        f"site_name: two\ntheme: {{name: material, font: false}}\nextra:{settings}\nplugins: [search, offline]\n"
    )
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet"],
        cwd=tmp_path,
        check=True,
        timeout=120,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    page = tmp_path / "site" / "index.html"
    assert re.findall(r'<(?:script|link)[^>]+(?:src|href)="https?:', page.read_text()) == []
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom".split()
    url = f"{page.as_uri()}?q=gradients"
    shown = subprocess.run(
        [BROWSER, *flags, "--virtual-time-budget=8000", f"--user-data-dir={tmp_path}/profile", url],
        capture_output=True,
        text=True,
        timeout=90,
    ).stdout
    assert "1 matching document" in shown and '/other.html" class="md-search-result__link"' in shown
