"""Every example has a page and a row of the index, and their links lead to pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools.launcher.programs import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
FOLDERS = sorted(
    folder.name for folder in EXAMPLES.iterdir() if folder.is_dir() and folder.name[0] not in "._"
)


def test_the_index_has_a_row_for_every_example() -> None:
    rows = re.findall(
        r"(?m)^\| \[(\w+)\]\((\w+)/README\.md\) \| .+ \| .+ \| [\d, ]+ \| \[.+\]\(.+\) \|$", index()
    )
    assert rows == [(folder, folder) for folder in FOLDERS]
    assert len(rows) == len(re.findall(r"(?m)^\| \[", index()))


@pytest.mark.parametrize("page", ["README.md", *(f"{folder}/README.md" for folder in FOLDERS)])
def test_pages_exist_and_their_links_lead_somewhere(page: str) -> None:
    text = (EXAMPLES / page).read_text(encoding="utf-8")
    assert text.startswith("# ") and len(text.splitlines()) < 70
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert Path(EXAMPLES / page).parent.joinpath(link).exists(), link


def index() -> str:
    return (EXAMPLES / "README.md").read_text(encoding="utf-8")
