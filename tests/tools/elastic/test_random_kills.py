"""SIGKILL of any process of a job at any time: the job ends or continues, and nothing is lost or left behind.

DS_KILLS sets the number of jobs, DS_KILLS_SEED the seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.tools.elastic.test_going_on import SCRIPT, config
from tests.tools.launcher.programs import COMMAND, environment
from tests.tools.launcher.test_kills import LIMIT_S, MARK, marked

psutil = pytest.importorskip("psutil")
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the Linux kernel's help"),
    pytest.mark.slow,
]

KILLS = int(os.environ.get("DS_KILLS", "4"))
SEED = int(os.environ.get("DS_KILLS_SEED", "0"))
OVER_S = 5.0
VICTIMS = ("rank 0", "rank 1", "launcher", "command")


def processes_of(command: int) -> dict[str, int]:
    """Return the current processes of a job, by role."""
    found = {"command": command}
    for process in psutil.Process(command).children(recursive=True):
        try:
            words, names = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        if "deepspeed.tools.launcher.launch" in words:
            found["launcher"] = process.pid
        elif any(word.endswith("shim.py") for word in words) and "RANK" in names:
            found[f"rank {names['RANK']}"] = process.pid
    return found


def in_shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """Return a mark in the environment of every process of the job; none of them outlives the test."""
    yield str(tmp_path)
    for process in marked(str(tmp_path)):
        os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("number", range(KILLS))
def test_nothing_is_lost_or_left(tmp_path: Path, number: int, mark: str) -> None:
    choice = random.Random(SEED * 1000 + number)
    elastic, after_s = choice.random() < 0.5, choice.uniform(0.3, 7.0)
    victim = choice.choice(VICTIMS)
    (tmp_path / "memory").mkdir()
    settings: dict[str, Any] = config(choice.choice([1, 2, 3]))
    settings["checkpoint"] = {"folder": str(tmp_path / "ckpt"), "resume": True, "keep_last": 2}
    job = subprocess.Popen(
        [
            *COMMAND,
            *(["--elastic_training"] if elastic else []),
            *("--num_gpus", "2", "--no_local_rank", SCRIPT, str(tmp_path), json.dumps(settings), "100000"),
            *("pause=0.01", f"save={tmp_path / 'ckpt'}"),
        ],
        cwd=tmp_path,
        env=environment(**{MARK: mark, "DEEPSPEED_ELASTIC_MEMORY": str(tmp_path / "memory")}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(after_s)
    there = processes_of(job.pid)
    saved = newest(tmp_path)
    os.kill(there.get(victim, job.pid), signal.SIGKILL)
    began = time.monotonic()
    if elastic and victim.startswith("rank") and victim in there:
        # Before the first finished step the job may end instead.
        while newest(tmp_path) in (saved, None) and job.poll() is None and time.monotonic() < began + LIMIT_S:
            time.sleep(0.05)
        assert job.poll() is not None or (newest(tmp_path) or 0) > (saved or 0), "it did not go on"
        assert saved is None or job.poll() is None, "it ended"
        job.send_signal(signal.SIGTERM)
        began = time.monotonic()
    job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    while marked(mark) and time.monotonic() < began + LIMIT_S:
        time.sleep(0.02)
    took = time.monotonic() - began
    print(f"{victim} after {after_s:.1f} s, elastic: {elastic}, at step {saved}: over after {took:.1f} s")
    assert marked(mark) == [] and took < OVER_S
    assert list((tmp_path / "memory").iterdir()) == []
    assert not [name for name in in_shared_memory() if str(there.get("launcher")) in name]
    if newest(tmp_path) is not None:
        assert get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "ckpt"))


def newest(folder: Path) -> int | None:
    """The step of the newest checkpoint."""
    try:
        return int((folder / "ckpt" / "latest").read_text().removeprefix("global_step"))
    except OSError:
        return None
