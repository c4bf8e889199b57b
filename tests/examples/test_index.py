"""Every example has a page and a row of the index, their links lead to pages, and a page has a time and an output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.printed_commands import COMMAND, FENCE
from tests.tools.launcher.programs import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
FOLDERS = sorted(
    folder.name for folder in EXAMPLES.iterdir() if folder.is_dir() and folder.name[0] not in "._"
)
ROW = r"(?m)^\| \[(\w+)\]\((\w+)/README\.md\) \| .+ \| .+ \| [\d, ]+ \| (\d+(?:\.5)?) \| \[.+\]\(.+\) \|$"


def test_the_index_has_a_row_for_every_example() -> None:
    rows = re.findall(ROW, index())
    assert [row[:2] for row in rows] == [(folder, folder) for folder in FOLDERS]
    assert len(rows) == len(re.findall(r"(?m)^\| \[", index()))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_page_has_the_time_of_the_index_and_an_output(folder: str) -> None:
    """The first time of a page is that of the first run that it shows. A block without a command is an output."""
    text = (EXAMPLES / folder / "README.md").read_text(encoding="utf-8")
    time = re.search(r"(\d+(?:\.5)?) minutes?\s+on\s+(?:one|two)(?:\s+busy)?\s+cores?", text)
    assert time and time[1] == {row[0]: row[2] for row in re.findall(ROW, index())}[folder]
    blocks = [block[2].splitlines() for block in FENCE.finditer(text)]
    assert any(not any(COMMAND.match(line.strip()) for line in block) for block in blocks)


@pytest.mark.parametrize("page", ["README.md", *(f"{folder}/README.md" for folder in FOLDERS)])
def test_pages_exist_and_their_links_lead_somewhere(page: str) -> None:
    text = (EXAMPLES / page).read_text(encoding="utf-8")
    assert text.startswith("# ") and len(text.splitlines()) < 70
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert Path(EXAMPLES / page).parent.joinpath(link).exists(), link


def index() -> str:
    return (EXAMPLES / "README.md").read_text(encoding="utf-8")
