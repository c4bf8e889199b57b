"""csrc/comm under ThreadSanitizer: ranks as threads of one process, the queue of a channel used by several threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import ROOT

SOURCES = ("csrc/reduce/*.cpp", "csrc/common/*.cpp", "tests/comm/threads.cpp")


def build(folder: Path, *, weaker: bool = False) -> Path:
    """The program of threads.cpp; `weaker`: with counters whose memory orders promise nothing."""
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux")
    comm = folder / "comm"
    shutil.copytree(ROOT / "csrc" / "comm", comm)
    if weaker:
        header = comm / "counter.h"
        text = header.read_text().replace("memory_order_acquire", "memory_order_relaxed")
        header.write_text(text.replace("memory_order_seq_cst", "memory_order_relaxed"))
    sources = [path for pattern in SOURCES for path in ROOT.glob(pattern)] + list(comm.glob("*.cpp"))
    program = folder / "threads"
    command = [compiler, "-std=gnu++20", "-O1", "-g", "-fsanitize=thread", "-fopenmp"]
    command += [f"-I{ROOT / 'csrc' / 'include'}", f"-I{comm}", *map(str, sources), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("no ThreadSanitizer library")
    assert built.returncode == 0, built.stderr
    return program


def run(program: Path, steps: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    found = subprocess.run(
        [str(program), str(steps)], env=environment, capture_output=True, text=True, timeout=300
    )
    if "unexpected memory mapping" in found.stderr:
        pytest.skip("ThreadSanitizer does not start on this kernel")
    return found


@pytest.mark.slow
def test_no_data_races(tmp_path):
    found = run(build(tmp_path), 400)
    assert found.returncode == 0 and found.stdout == "right\n", found.stderr[-4000:]


@pytest.mark.slow
def test_races_would_be_seen(tmp_path):
    assert "WARNING: ThreadSanitizer: data race" in run(build(tmp_path, weaker=True), 40).stderr
