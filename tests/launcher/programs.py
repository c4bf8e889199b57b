"""Starting the real command on small scripts, for the tests beside this file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "deepspeed.launcher.runner"]
TIMEOUT_S = 60
OF_LAUNCHER = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "GOMP_SPINCOUNT",
}


def environment(**changes: str) -> dict[str, str]:
    """This process's, without what a launcher above may have set, and with the package under test first."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHER}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", **changes}


def deepspeed(*arguments: object, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs `deepspeed` with these arguments to its end."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment(**changes), capture_output=True, text=True, timeout=TIMEOUT_S
    )
