"""Models larger than the memory they may use; the kernel enforces the budget (benchmarks/offload_budget.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "model, budget_gib, options",
    [
        ("10M", 0.375, []),
        pytest.param("300M", 0.5, [], marks=pytest.mark.slow),
        pytest.param("3B", 2.0, ["--no-save", "--steps", "2"], marks=pytest.mark.slow),
    ],
)
def test_trains_within_its_budget(model: str, budget_gib: float, options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "offload_budget.py", "--model", model]
    command += ["--budget-gib", str(budget_gib), "--folder", tmp_path, *options]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        environment.pop(name, None)
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(x) for x in re.search(r"^loss +(.*)$", done.stdout, re.M)[1].split()]
    peak = float(re.search(r"peak of private memory, GiB +([\d.]+)", done.stdout)[1])
    assert losses[-1] < losses[0] - 0.5
    assert peak < budget_gib
    assert not list(tmp_path.iterdir())
