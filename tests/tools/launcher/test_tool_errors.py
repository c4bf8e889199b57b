"""Errors of the tools for unexpected input: one sentence, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed.base.tool_arguments import INTERRUPTED, exit_quietly
from deepspeed.tools.ds import run_tool


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "text").write_text("no such thing\n")
    (tmp_path / "list").write_text("[1, 2]\n")
    (tmp_path / "object").write_text("{}\n")
    (tmp_path / "other").write_text(json.dumps({"deepspeed": {"rank": 0}, "traceEvents": []}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank00000.jsonl").write_bytes(b"[1]\n")
    return tmp_path


WRONG = [
    ("check", ["binary"], "is not text in UTF-8"),
    ("check", ["binary.yaml"], "is not text in UTF-8"),
    ("check", ["object", "--fix", "--output", "nowhere/fixed"], "No such file or directory"),
    ("elastic", ["-c", "binary"], "is not text in UTF-8"),
    ("elastic", ["-c", "empty"], "is a folder"),
    ("plan", ["binary", "--model", "x"], "is not text in UTF-8"),
    ("trace", ["nowhere"], "does not exist: pass the trace.path folder"),
    ("trace", ["binary"], "is not a timeline"),
    ("trace", ["list"], "is not a timeline"),
    ("trace", ["other"], "is not a timeline"),
    ("diff", ["run", "run"], "is not an audit file"),
    ("diff", ["binary", "text"], "pass the audit.record folder"),
    ("ssh", ["-f", "binary", "ls"], "is not text in UTF-8; a hostfile has lines 'HOST slots=N'"),
    ("ssh", ["-f", "nowhere", "ls"], "no such file; pass a file with lines 'HOST slots=N'"),
    ("doctor", ["--hostfile", "binary"], "is not text in UTF-8"),
    ("nvme_tune", ["--nvme_dir", "text"], "no such directory"),
    ("nvme_tune", ["--nvme_dir", "empty", "--sweep_config", "text"], "is not JSON"),
    ("nvme_tune", ["--nvme_dir", "empty", "--sweep_config", "list"], "is not an object"),
]


@pytest.mark.parametrize(("tool", "arguments", "said"), WRONG, ids=lambda value: str(value)[:30])
def test_wrong_files_are_named(
    files: Path, monkeypatch: Any, capsys: Any, tool: str, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(files)
    assert run_tool(tool, arguments) in (1, 2)
    printed = "".join(capsys.readouterr())
    assert said in printed
    assert any(name in printed for name in arguments)


def test_ctrl_c_ends_a_tool_without_a_traceback(capsys: Any) -> None:
    @exit_quietly("a tool")
    def main() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == INTERRUPTED and capsys.readouterr().err == "interrupted\n"


PRINTS = """
import os
from deepspeed.base.tool_arguments import exit_quietly

@exit_quietly("a tool")
def main(own):
    if own:
        ends = os.pipe()
        os.close(ends[0])
        os.write(ends[1], b"x")
    for _ in range(100_000):
        print("a line of a table")

main({own})
"""


@pytest.mark.parametrize("own", [False, True])
def test_a_reader_that_has_seen_enough_is_no_error(own: bool) -> None:
    """A pipe of the tool's own that breaks is one."""
    reading, writing = os.pipe()
    tool = subprocess.Popen(
        [sys.executable, "-c", PRINTS.format(own=own)], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    with os.fdopen(reading) as lines:
        if not own:
            assert lines.readline() == "a line of a table\n"
            lines.close()
        errors = tool.communicate(timeout=60)[1]
    assert (tool.returncode, "BrokenPipeError" in errors) == ((1, True) if own else (0, False))
