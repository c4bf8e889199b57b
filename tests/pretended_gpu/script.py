"""Runs a script of `benchmarks/gpu` with the pretended GPU, in its process and in those of its ranks.

python -m tests.pretended_gpu.script SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from tests import pretended_gpu

ROOT = Path(__file__).resolve().parents[2]
AT_START = Path(__file__).with_name("at_start")


def main() -> None:
    pretended_gpu.install()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import jobs

    made = jobs.rank_environment

    def with_device(*arguments: Any) -> dict[str, str]:
        environment = made(*arguments)
        return environment | {"PYTHONPATH": os.pathsep.join([str(AT_START), environment["PYTHONPATH"]])}

    jobs.rank_environment = with_device
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
