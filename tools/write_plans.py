"""Write what `ds plan` prints into the pages of docs/recipes; with `--check`, only compare.

A page has the config in a block titled ds_config.json, the command in a line that begins with `ds plan`, and behind it
the block that this tool writes: the first lines and those below the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deepspeed.tools.plan import main as plan  # noqa: E402

CONFIG = re.compile(r'```json title="ds_config.json"\n(.*?)```', flags=re.S)
PLANNED = re.compile(
    r"(?m)^    (?:PYTHONPATH=\S+ )?(ds plan ds_config.json [^\n]*(?:\\\n[^\n]*)*)\n\n```text\n(.*?)```",
    flags=re.S,
)
# Planned on any machine, so the options say all that would be looked up on this one.
NEEDED = ("--model", "--gpus", "--host-memory", "--sequence")
TABLE = re.compile(r"\w+, \w+ per rank ")


def pages() -> list[Path]:
    """The recipes that plan something."""
    return [
        page
        for page in sorted((ROOT / "docs/recipes").glob("*.md"))
        if CONFIG.search(page.read_text("utf-8"))
    ]


def planned(page: str) -> str:
    """Return the text of a page with what its command prints now. ValueError: the plan fails or does not fit."""
    config, command = CONFIG.search(page), PLANNED.search(page)
    if config is None or command is None:
        raise ValueError("no config, or no `ds plan ds_config.json ...` with a block of text behind it")
    words = shlex.split(command[1].replace("\\\n", " "))[3:]
    if lacking := [name for name in NEEDED if name not in words]:
        raise ValueError(f"the plan depends on this machine: give {', '.join(lacking)}")
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        file = Path(folder, "ds_config.json")
        file.write_text(config[1], encoding="utf-8")
        code = plan([str(file), *words])
    if code != 0:
        raise ValueError(f"ds plan ends with {code}: {said.getvalue()}")
    return page[: command.start(2)] + without_tables(said.getvalue()) + page[command.end(2) :]


def without_tables(text: str) -> str:
    """Return the printed plan with "..." for its tables, which have a heading and indented rows."""
    kept: list[str] = []
    inside = False
    for line in text.strip().splitlines():
        inside = bool(TABLE.match(line)) or inside and line.startswith("  ")
        if not inside:
            kept.append(line)
        elif kept[-1] != "...":
            kept.append("...")
    return "\n".join(kept) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the plans into the recipes.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    options = parser.parse_args(argv)
    # `--model twin:adapted_8b` is a module beside the twins.
    sys.path.insert(0, str(ROOT / "examples/recipes"))
    os.chdir(ROOT)  # to which paths in the commands are relative
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        try:
            wanted = planned(text)
        except ValueError as error:
            raise SystemExit(f"{page.name}: {error}") from None
        if wanted != text:
            stale.append(page.name)
            if not options.check:
                page.write_text(wanted, encoding="utf-8")
    if stale:
        print(f"{'stale' if options.check else 'written'}: {', '.join(stale)}", file=sys.stderr)
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
