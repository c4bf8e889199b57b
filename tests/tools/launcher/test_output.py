"""Lines of ranks with their numbers."""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path

import pytest

from deepspeed.tools.launcher.agent import PrefixedOutput
from tests.tools.launcher.programs import deepspeed

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


def test_lines_are_whole_and_have_their_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(err))
    streams = PrefixedOutput(tmp_path)
    for local_rank in range(2):
        (tmp_path / str(local_rank)).mkdir()
    paths = [streams.pipes(i, str(i + 4)) for i in range(2)]

    def write(rank: int) -> None:
        stdout, stderr = map(Path, paths[rank])
        with open(stdout, "wb", buffering=0) as stream:
            for number in range(50):
                stream.write(f"{number} of ".encode())
                stream.write(f"{rank}\n".encode())
        stderr.write_bytes(b"10 %\r20 %\rdone")

    writers = [threading.Thread(target=write, args=(rank,)) for rank in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    streams.drain()
    lines = out.getvalue().decode().splitlines()
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[rank {rank + 4}] ")]
        assert own == [f"[rank {rank + 4}] {number} of {rank}" for number in range(50)]
    assert len(lines) == 100
    printed = err.getvalue().decode()
    parts = ("10 %\r", "20 %\r", "done\n")
    assert all(f"[rank {rank}] {part}" in printed for rank in (4, 5) for part in parts)


def test_the_traceback_comes_before_the_report(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "print('hello', flush=True)\n"
        "if os.environ['RANK'] == '0':\n"
        "    open('said', 'w').close()\n"
        "    time.sleep(60)\n"
        "while not os.path.exists('said'):\n"
        "    time.sleep(0.01)\n"
        "raise ValueError('boom')\n"
    )
    result = deepspeed("--num_gpus", 2, "--prefix_output", "train.py", cwd=tmp_path)
    assert result.returncode == 1
    assert sorted(result.stdout.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]
    lines = [line for line in result.stderr.splitlines() if "info" not in line.lower()]
    told = next(number for number, line in enumerate(lines) if "rank 1 of train.py failed first" in line)
    assert "[rank 1] Traceback (most recent call last):" in lines[:told]
    assert "[rank 1] ValueError: boom" in lines[:told]
