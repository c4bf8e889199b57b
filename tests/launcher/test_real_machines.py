"""Jobs over machines with a network of their own and a real sshd or pdsh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import links
from tests.elasticity import elastic_run
from tests.elasticity.test_going_on import SCRIPT, config, until
from tests.launcher import real_machines
from tests.launcher.programs import COMMAND, TIMEOUT_S, environment
from tests.launcher.test_kills import LIMIT_S, MARK, marked

psutil = pytest.importorskip("psutil")
REASON = real_machines.why_not() or links.why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=f"no real machines: {REASON}"), pytest.mark.slow]

MEET = """\
import socket, sys, time
import torch
import deepspeed
from deepspeed import comm as dist

deepspeed.init_distributed(dist_backend="gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print(socket.gethostname(), int(ones.item()), sys.argv[1:], flush=True)
if "raise" in sys.argv and dist.get_rank() == 1:
    raise ValueError("boom")
if "wait" in sys.argv:
    open(f"here{dist.get_rank()}", "w").close()
    time.sleep(120)
dist.barrier()
"""
HOSTILE = "a b'c\"d;$(touch pwned)`touch pwned`%n%h\\ *&|"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[real_machines.Machines]:
    (tmp_path / "meet.py").write_text(MEET)
    (tmp_path / "hosts").write_text("host0 slots=1\nhost1 slots=1\n")
    with real_machines.Machines(2, tmp_path) as made:
        yield made


def started(
    machines: real_machines.Machines, *arguments: str, launcher: str = "ssh", **variables: str
) -> Any:
    given = [
        *("--hostfile", "hosts", "--launcher", launcher, "--no_local_rank"),
        *("--launcher_args", f"-F {machines.ssh_config}"),
    ]
    return subprocess.Popen(
        [*machines.entry(0), *COMMAND, *given, *arguments],
        cwd=machines.folder,
        env=environment(DEEPSPEED_ELASTIC_MEMORY=str(machines.folder), **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ranks_meet_over_the_network(machines: real_machines.Machines) -> None:
    job = started(machines, "meet.py", HOSTILE)
    said, errors = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, errors
    assert sorted(said.splitlines()) == [f"host{i}: host{i} 2 {[HOSTILE]}" for i in range(2)]
    assert not (machines.folder / "pwned").exists()


def test_the_cause_is_told_once(machines: real_machines.Machines) -> None:
    job = started(machines, "meet.py", "raise")
    errors = job.communicate(timeout=TIMEOUT_S)[1]
    assert job.returncode == 1
    assert errors.count("Traceback") == 1 and "ValueError: boom" in errors
    assert "rank 1 (host1) of meet.py failed first: ValueError: boom" in errors


@pytest.mark.parametrize("victim", ["ssh", "command"])
def test_nothing_is_left_on_the_other_machine(machines: real_machines.Machines, victim: str) -> None:
    value = f"{os.getpid()}-{victim}"
    job = started(machines, "meet.py", "wait", **{MARK: value})
    until(lambda: all((machines.folder / f"here{rank}").exists() for rank in range(2)), job)
    clients = [p for p in psutil.Process(job.pid).children(recursive=True) if p.name() == "ssh"]
    (clients[0] if victim == "ssh" else psutil.Process(job.pid)).kill()
    began = time.monotonic()
    job.communicate(timeout=TIMEOUT_S)
    while marked(value) and time.monotonic() < began + LIMIT_S:
        time.sleep(0.02)
    assert marked(value) == []
    assert time.monotonic() - began < 5.0


def test_a_machine_that_vanishes_is_done_without(machines: real_machines.Machines) -> None:
    settings = config(3)
    job = started(
        machines, "--elastic_training", SCRIPT, str(machines.folder), json.dumps(settings), "100000"
    )
    try:
        until(lambda: len(elastic_run.read(machines.folder)[1]) > 3, job)
        machines.stop(1)
        began = time.monotonic()
        until(lambda: [start["size"] for start in elastic_run.read(machines.folder)[0]] == [2, 2, 1], job)
        print(f"went on after {time.monotonic() - began:.1f} s")
        starts, made = elastic_run.read(machines.folder)
        until(lambda: max(elastic_run.read(machines.folder)[1]) > starts[-1]["began"] + 3, job)
    finally:
        job.send_signal(signal.SIGTERM)
        print(job.communicate(timeout=TIMEOUT_S)[1])
    starts, made = elastic_run.read(machines.folder)
    assert starts[-1]["began"] >= max(step for step in made if len(made[step]) == 2)
