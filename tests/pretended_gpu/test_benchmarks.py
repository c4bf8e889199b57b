"""Every script of `benchmarks/gpu` runs to its last table where the only GPU is a pretended one."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import pretended_gpu
from tests.pool import ROOT

SCRIPTS = {
    "attention_kernels": (
        ["--quick"],
        ["block-sparse attention", "paged attention", "Evoformer attention"],
    ),
    "kernels": (
        ["--width", "128", "--tokens", "16", "--rounds", "1"],
        ["product of 64 rows, int4", "floats of 12 bits"],
    ),
    "lightning_strategy": (["--quick"], ["Lightning alone", "stage 3, all on the host"]),
    "offload": (["--quick", "--model", "50M", "--context", "16"], ["in memory", "offloaded"]),
    "train_step": (["--quick"], ["DDP", "ours, stage 2"]),
}
NEEDED = {"kernels": "triton", "lightning_strategy": "lightning"}

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for GPUs"),
    pytest.mark.skipif(
        torch.__version__ < "2.13", reason="the device is written for torch 2.13's C++ interface"
    ),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler"),
]


def test_every_script_is_here() -> None:
    assert {path.stem for path in (ROOT / "benchmarks" / "gpu").glob("*.py")} == SCRIPTS.keys()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretended_gpu.build(tmp_path_factory.mktemp("device"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_with_its_tables(name: str, library: Path, tmp_path: Path) -> None:
    if (needed := NEEDED.get(name)) and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    arguments, rows = SCRIPTS[name]
    script = ROOT / "benchmarks" / "gpu" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, "-m", "tests.pretended_gpu.script", str(script), *arguments],
        cwd=ROOT,
        env={
            **os.environ, pretended_gpu.LIBRARY_VARIABLE: str(library), "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path),
        },
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    for row in rows:
        assert re.search(rf"^{re.escape(row)}", done.stdout, re.MULTILINE), done.stdout
    # A table or a cell that could not be made says why. CUDA's flash attention has no kernel of the host's.
    assert "Error" not in done.stdout.replace("NotImplementedError", ""), done.stdout
