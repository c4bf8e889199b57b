"""`make bench`: its scripts exist and take their arguments; one of them runs and ends in the table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import everything  # noqa: E402


@pytest.mark.parametrize("run", everything.RUNS, ids=lambda run: run.name)
def test_a_script_takes_its_arguments(run: everything.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "interpreter", lambda name: Path("there") / name)
    command, without = everything.command_of(run, "mine", quick=False)
    assert command is not None and not without
    module = __import__(run.script)
    if hasattr(module, "parse"):
        module.parse(command[2:])
    else:
        assert not run.arguments and run.peer is None
    assert command[-1] == f"{run.what}_mine".lstrip("_")


def test_what_is_missing_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "interpreter", lambda name: None)
    assert everything.command_of(everything.Run("trl_step", clients=True), None, True)[0] is None
    command, without = everything.command_of(everything.Run("start"), None, True)
    assert command is not None and "--peer" not in command and without == "without ../peer"


def test_a_run_ends_in_a_table() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "everything.py"), "--quick", "--only", "checkpoint"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(text in done.stdout for text in ("ours, stage 2", "MB on disk"))  # its own table
    assert done.stdout.rstrip().splitlines()[-1].startswith("checkpoint")
