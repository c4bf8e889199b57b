"""Environment variables that a job's other machines receive: a selection of this process's own, plus
``.deepspeed_env`` files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from deepspeed.tools.launcher.errors import LaunchError
from deepspeed.tools.launcher.supervision import RUNNER_PID

ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
# Variables that configure communication, Python and this package. Nothing else leaves this machine: an environment
# holds secrets and machine-specific paths.
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
"""Name prefixes. A program that calls ``deepspeed.tools.launcher.runner.main`` may add some."""
PREFIXES = ("NCCL", "GLOO_", "TORCH_", "OMP_", "DS_", "DEEPSPEED_")
NAMES = ("LD_LIBRARY_PATH", "PATH")
LOCAL = (RUNNER_PID, "DS_ENV_FILE")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exports(
    environment: Mapping[str, str] | None = None, folders: tuple[str, ...] | None = None
) -> dict[str, str]:
    """Return name -> value. ``NAME=VALUE`` lines of ``.deepspeed_env`` (``DS_ENV_FILE``: another name or path) override
    the environment: first the home folder's file, then the current folder's. The value is all after the first ``=``.

    Raises:
        LaunchError: a line of such a file is malformed.
    """
    environment = os.environ if environment is None else environment
    prefixes = (*PREFIXES, *EXPORT_ENVS)
    found = {
        name: value
        for name, value in environment.items()
        if (name.startswith(prefixes) or name in NAMES) and name not in LOCAL and _NAME.fullmatch(name)
    }
    for folder in folders or (os.path.expanduser("~"), "."):
        path = Path(folder, ENVIRONMENT_NAME)
        if path.is_file():
            found |= read_environment_file(path)
    return found


def read_environment_file(path: Path) -> dict[str, str]:
    """Return the variables of one file, skipping empty lines and ``#`` comments."""
    variables = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name = name.strip().removeprefix("export ").strip()
        if not equals or not _NAME.fullmatch(name):
            # Do not quote the line: it may hold a secret.
            raise LaunchError(f"{path}, line {number}: each line must read NAME=VALUE")
        variables[name] = value.rstrip("\r")
    return variables
