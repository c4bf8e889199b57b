"""The elastic example: it learns, and a second command resumes where the first one ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.tools.launcher.programs import COMMAND, REPOSITORY, deepspeed, environment

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


@pytest.mark.slow
def test_after_a_kill_no_step_is_lost(tmp_path: Path) -> None:
    """The states are those that another rank kept in memory: nothing was saved."""
    given = [SCRIPT, "--folder", tmp_path / "run", "--steps", 150, "--save_every", 5000]
    with subprocess.Popen(
        [*COMMAND, "--elastic_training", "--num_gpus", "3", *map(str, given)],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        assert job.stdout is not None
        output = ""
        for line in job.stdout:
            output += line
            if "step=50," in line and "resumed" not in output:
                (victim,) = re.findall(r"rank 2 of 3: PID (\d+)", output)
                os.kill(int(victim), signal.SIGKILL)
    assert job.returncode == 0, output
    (step,) = re.findall(r"resumed at step (\d+), from the state in memory", output)
    assert int(step) >= 49 and re.search(r"(?m)step 150: loss [\d.]+$", output), output
