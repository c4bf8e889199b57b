"""The example of a pipeline in a short form: it learns, and its checkpoint gives the same model again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.launcher.programs import REPOSITORY, environment

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def losses(schedule: str, steps: int, folder: Path, ranks: int = 2, *more: str) -> tuple[float, float]:
    script = [
        str(REPOSITORY / "examples" / "pipeline" / "train.py"),
        "--schedule",
        schedule,
        "--steps",
        str(steps),
        *more,
    ]
    done = subprocess.run(
        [*TORCHRUN, str(ranks), *script, "--output", str(folder / schedule)],
        env=environment() | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = map(float, re.findall(r"loss (\S+) -> (\S+) in", done.stdout)[0])
    reached, loaded = re.findall(r"evaluated (\S+), from the checkpoint (\S+)", done.stdout)[0]
    assert reached == loaded
    return first, last


def test_it_learns_and_comes_back(tmp_path: Path) -> None:
    first, last = losses("1f1b", 20, tmp_path)
    assert last < 0.7 * first


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zero-bubble", "interleaved", "zero-bubble-v", "auto"])
def test_every_schedule_learns_the_same(schedule: str, tmp_path: Path) -> None:
    assert losses(schedule, 6, tmp_path) == pytest.approx(losses("1f1b", 6, tmp_path), abs=2e-4)


@pytest.mark.slow
def test_two_replicas_of_each_stage(tmp_path: Path) -> None:
    first, last = losses("interleaved", 20, tmp_path, 4, "--stages", "2", "--zero", "2")
    assert last < 0.7 * first
