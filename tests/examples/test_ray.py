"""examples/clusters/ray: real Ray starts two workers, loses one, and both go on from the last checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import ROOT

pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("ray.train.torch", reason='Ray Train is not installed: pip install "ray[train]"')


@pytest.mark.slow
def test_a_worker_is_lost_and_training_goes_on(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "clusters" / "ray" / "train.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, script, "--workers", "2", "--storage", str(tmp_path), "--lose", "15"],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained: step 40, loss" in done.stdout
    assert "resumed at step 10" in done.stdout + done.stderr
