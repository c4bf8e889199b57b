"""Check the subjects of commits: one line of at most 72 characters, without a period at its end, then a blank line.

    python tools/check_commits.py [BASE]      # the commits after BASE; default: those made since this script is there

Merges are exempt. A subject that joins two ideas with a semicolon is pointed out, but is no error. Without git, without
history or in a clone too shallow to have BASE, nothing is checked.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_SUBJECT = 72
FILE = Path(__file__).resolve()


def problems(message: str) -> Iterator[str]:
    """Yield what is wrong with the form of a commit message."""
    subject, *rest = message.rstrip("\n").split("\n")
    if not subject.strip():
        yield "the subject is empty"
    if len(subject) > MAX_SUBJECT:
        yield f"the subject has {len(subject)} characters, of at most {MAX_SUBJECT}: move the reason into the body"
    if subject.endswith(".") and not subject.endswith("..."):
        yield "the subject ends with a period"
    if rest and rest[0].strip():
        yield "the second line is not blank"


def joins_ideas(message: str) -> bool:
    return "; " in message.split("\n", 1)[0]


def messages(folder: Path, base: str | None) -> list[tuple[str, str]]:
    """Return (short hash, message) of the commits in `folder` after `base`, which is the script's own by default."""
    base = base or _first_of(folder)
    if base is None:
        return []
    # The ancestry path leaves out branches that began before the base and were merged after it.
    text = _git(folder, "log", "--no-merges", "--ancestry-path", "--format=%h%n%B%x00", f"{base}..HEAD")
    entries = [entry.strip("\n") for entry in (text or "").split("\0")]
    return [(entry.split("\n", 1)[0], entry.partition("\n")[2]) for entry in entries if entry]


def _first_of(folder: Path) -> str | None:
    """Return the commit that added this script, or None where it is not known."""
    found = _git(folder, "log", "--diff-filter=A", "--format=%H", "--", f"tools/{FILE.name}")
    return (
        found.split()[-1]
        if found and _git(folder, "rev-parse", "--is-shallow-repository") == "false\n"
        else None
    )


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def main(base: str | None = None, folder: Path = FILE.parent.parent) -> int:
    wrong = 0
    for commit, message in messages(folder, base):
        subject = message.split("\n", 1)[0]
        for problem in problems(message):
            wrong += 1
            print(f"{commit} {subject!r}: {problem}")
        if joins_ideas(message):
            print(f"{commit} {subject!r}: note: are these two commits?")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
