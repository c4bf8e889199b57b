"""The page for users of DistributedDataParallel: both of its scripts print the same losses."""

from __future__ import annotations

import re
from pathlib import Path

from tests.examples.test_first_training import BLOCK, as_pattern, run
from tests.tools.launcher.programs import REPOSITORY

PAGE = REPOSITORY / "docs" / "from_ddp.md"


def test_both_scripts_print_the_same_losses(tmp_path: Path) -> None:
    printed: dict[str, str] = {}
    for _, title, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if title:
            (tmp_path / title).write_text(text, encoding="utf-8")
            continue
        for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
            command, *promised = part.splitlines()
            printed[command.split()[-1]] = said = run(command, tmp_path)
            for line in promised:
                assert re.search("^" + as_pattern(line), said, flags=re.M), (line, said)
    before, after = (
        re.findall(r"^update .*$", printed[name], flags=re.M) for name in ("before.py", "after.py")
    )
    assert before == after and len(before) == 3
    assert (tmp_path / "weights.pt").is_file() and (tmp_path / "checkpoint" / "latest").is_file()
