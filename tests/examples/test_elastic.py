"""The example of a run that goes on: it learns, and a second command goes on where the first one ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.launcher.programs import REPOSITORY, deepspeed

SCRIPT = REPOSITORY / "examples/elastic/train.py"


@pytest.mark.slow
def test_the_same_command_begins_and_goes_on(tmp_path: Path) -> None:
    losses = []
    for steps in (20, 300):
        given = [
            "--elastic_training",
            "--num_gpus",
            2,
            SCRIPT,
            "--folder",
            tmp_path / "run",
            "--save_every",
            20,
        ]
        result = deepspeed(*given, "--steps", steps, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        last = result.stdout.splitlines()[-1]
        assert f"step {steps}: loss" in last
        losses.append(float(last.split()[-1]))
    assert "resumed at step 20" in result.stdout + result.stderr
    assert losses[1] < losses[0]
    assert (tmp_path / "run/latest").read_text() == "global_step300"
    assert len(list((tmp_path / "run").glob("global_step*"))) == 2
