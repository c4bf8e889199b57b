"""`tools/check_commits.py`: the form of a subject, and which commits are looked at."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "check_commits.py"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git(tmp_path, "init", "-q", "-b", "main")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout


def commit(folder: Path, message: str) -> None:
    git(folder, "commit", "-q", "--allow-empty", "--cleanup=verbatim", "-m", message)


def add_script(folder: Path) -> None:
    (folder / "tools").mkdir()
    shutil.copy(SCRIPT, folder / "tools")
    git(folder, "add", "tools")
    commit(folder, "Check the subjects of commits")


def check(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-S", str(folder / "tools" / SCRIPT.name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_only_commits_made_with_the_script_are_checked(repository: Path) -> None:
    commit(repository, "An old subject. " * 9)
    git(repository, "branch", "older")
    add_script(repository)
    commit(repository, "Short enough\n\nThe reason, which may be as long as it has to be: " + "word " * 30)
    git(repository, "checkout", "-q", "older")
    commit(repository, "Made on a branch that began before the script was there.")
    git(repository, "checkout", "-q", "main")
    git(repository, "merge", "-q", "--no-ff", "older", "-m", "Merge " + "x" * 90)
    assert check(repository) == (0, "")
    status, text = check(repository, "main~2^")  # before the branch
    assert status == 1 and text.count("ends with a period") == 1


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("x" * 73, "73 characters, of at most 72"),
        ("Ends with a period.", "ends with a period"),
        ("A subject\nthat goes on", "second line is not blank"),
    ],
)
def test_a_subject_of_another_form_is_refused(repository: Path, message: str, problem: str) -> None:
    add_script(repository)
    commit(repository, "x" * 72)
    commit(repository, message)
    status, text = check(repository)
    assert status == 1 and problem in text and len(text.splitlines()) == 1


def test_two_ideas_are_pointed_out(repository: Path) -> None:
    add_script(repository)
    commit(repository, "Mend one thing; rename another")
    status, text = check(repository)
    assert status == 0 and "are these two commits?" in text


def test_without_history_nothing_is_checked(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(SCRIPT, tmp_path / "tools")
    assert check(tmp_path) == (0, "")
