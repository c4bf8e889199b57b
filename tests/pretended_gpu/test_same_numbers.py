"""Training on a GPU equals training on the host: every tensor is on the right device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import pretended_gpu
from tests.pool import ROOT, free_port
from tests.pretended_gpu import cases

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for GPUs"),
    pytest.mark.skipif(
        torch.__version__ < "2.13", reason="the device is written for torch 2.13's C++ interface"
    ),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretended_gpu.build(tmp_path_factory.mktemp("device"))


def numbers_of(device: str, names: list[str], ranks: int, library: Path) -> list[dict[str, list[float]]]:
    """Of each rank."""
    command = [sys.executable, "-m", "tests.pretended_gpu.cases", device, *names]
    shared = {
        **os.environ,
        pretended_gpu.LIBRARY_VARIABLE: str(library),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "DEEPSPEED_PROGRESS": "0",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",  # where Triton is installed (make gpu-kernels), kernels of the package take part
    }
    jobs = [
        subprocess.Popen(
            command, cwd=ROOT, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    outputs = [job.communicate(timeout=300) for job in jobs]
    for job, (_, errors) in zip(jobs, outputs, strict=True):
        assert job.returncode == 0, errors[-6000:]
    lines = [[line for line in output.splitlines() if line.startswith(cases.MARK)] for output, _ in outputs]
    return [dict(json.loads(line.removeprefix(cases.MARK)) for line in of_rank) for of_rank in lines]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(1, [*cases.TRAINED, *cases.SPECIAL]), (2, [*cases.BY_RANKS, *cases.SPECIAL_BY_RANKS])],
    ids=["one rank", "two ranks"],
)
def test_the_same_numbers_as_on_the_host(ranks: int, names: list[str], library: Path) -> None:
    on_gpu = numbers_of("gpu", names, ranks, library)
    on_host = numbers_of("host", names, ranks, library)
    for found, expected in zip(on_gpu, on_host, strict=True):
        assert list(found) == names == list(expected)
        for name in names:
            narrow = any(word in name for word in ("16", "autocast", "SuperOffload", "quantized"))
            assert found[name] == pytest.approx(expected[name], rel=2e-2 if narrow else 1e-4, abs=1e-4), name


def test_two_devices_in_one_operation_are_refused(library: Path) -> None:
    """As on a real one: without that the other tests would show little."""
    code = (
        "from tests import pretended_gpu; pretended_gpu.install(); import torch\n"
        "x = torch.ones(2, device='cuda'); assert x.is_cuda and (x + 1).device == x.device\n"
        "assert torch.empty(3, pin_memory=True).is_pinned() and not torch.empty(3).is_pinned()\n"
        "x + torch.ones(2)"
    )
    env = {**os.environ, pretended_gpu.LIBRARY_VARIABLE: str(library)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("RuntimeError: Expected all tensors to be on the same device")
    )
