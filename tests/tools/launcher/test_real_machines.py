"""Jobs over machines with separate networks and a real sshd or pdsh."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from benchmarks import links
from tests.tools.elastic import elastic_run
from tests.tools.elastic.test_going_on import SCRIPT, config, until
from tests.tools.launcher import real_machines
from tests.tools.launcher.programs import COMMAND, TIMEOUT_S, environment
from tests.tools.launcher.test_kills import LIMIT_S, MARK, marked

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


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[real_machines.Machines]:
    folder = tmp_path_factory.mktemp("machines")
    (folder / "meet.py").write_text(MEET)
    (folder / "hosts").write_text("host0 slots=1\nhost1 slots=1\n")
    with real_machines.Machines(2, folder, slurm=True) as made:
        yield made


def started(
    machines: real_machines.Machines, *arguments: str, first: Sequence[str] = (), **variables: str
) -> Any:
    return subprocess.Popen(
        [*machines.entry(0), *first, *COMMAND, "--hostfile", "hosts", "--no_local_rank", *arguments],
        env=environment(DEEPSPEED_ELASTIC_MEMORY=str(machines.folder), **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


WAYS: dict[str, dict[str, Any]] = {
    "ssh": {},
    "pdsh": {},
    "openmpi": {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    | {"OMPI_MCA_oob_tcp_if_include": "eth0", "OMPI_MCA_btl_tcp_if_include": "eth0"},
    "slurm": {"first": ("salloc", "-Q", "-N2", "-n2")},
}


@pytest.mark.parametrize("launcher", WAYS)
def test_ranks_meet_over_the_network(machines: real_machines.Machines, launcher: str) -> None:
    job = started(machines, "--launcher", launcher, "meet.py", HOSTILE, **WAYS[launcher])
    said, errors = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, errors
    lines = sorted(re.sub(r"^host\d: ", "", line) for line in said.splitlines())
    assert lines == [f"host{i} 2 {[HOSTILE]}" for i in range(2)]
    assert not (machines.folder / "pwned").exists()


@pytest.mark.parametrize("launcher", WAYS)
def test_a_failure_ends_the_job(machines: real_machines.Machines, launcher: str) -> None:
    value = f"{os.getpid()}-{launcher}"
    given = WAYS[launcher] | {MARK: value}
    job = started(machines, "--launcher", launcher, "meet.py", "raise", **given)
    errors = job.communicate(timeout=TIMEOUT_S)[1]
    assert "ValueError: boom" in errors
    assert job.returncode == 1
    if launcher == "ssh":
        assert errors.count("Traceback") == 1
        assert "rank 1 (host1) of meet.py failed first: ValueError: boom" in errors
    over(value, time.monotonic())


def over(value: str, began: float) -> None:
    while marked(value) and time.monotonic() < began + LIMIT_S:
        time.sleep(0.02)
    assert marked(value) == []
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    "launcher, victim", [("ssh", "ssh"), ("ssh", ""), ("pdsh", "pdsh"), ("slurm", "srun")]
)
def test_nothing_is_left_on_any_machine(machines: real_machines.Machines, launcher: str, victim: str) -> None:
    """SIGKILL of the connection, or of the command."""
    for path in machines.folder.glob("here*"):
        path.unlink()
    value = f"{os.getpid()}-{launcher}-{victim}"
    job = started(machines, "--launcher", launcher, "meet.py", "wait", **(WAYS[launcher] | {MARK: value}))
    until(lambda: all((machines.folder / f"here{rank}").exists() for rank in range(2)), job)
    below = psutil.Process(job.pid).children(recursive=True)
    killed = (
        next((p for p in below if p.name().startswith(victim)), None) if victim else psutil.Process(job.pid)
    )
    assert killed is not None, [p.name() for p in below]
    killed.kill()
    began = time.monotonic()
    job.communicate(timeout=TIMEOUT_S)
    over(value, began)


def test_the_doctor_looks_at_every_pair(machines: real_machines.Machines) -> None:
    """And tells in less than 20 s (which is the goal for four machines)."""
    began = time.monotonic()
    command = [sys.executable, "-m", "deepspeed.tools.doctor", "--hostfile", "hosts"]
    done = machines.on(0, command, env=environment(), timeout=TIMEOUT_S)
    taken = time.monotonic() - began
    print(done.stdout, f"{taken:.1f} s")
    lines = done.stdout.splitlines()
    pair = next(line for line in lines if "host0 - host1" in line)
    assert re.search(r"^ok .*to host1 \d+ MB/s, to host0 \d+ MB/s$", pair)
    names = [line for line in lines if " names " in line or " own name " in line]
    assert len(names) == 4 and all(line.startswith("ok") for line in names)
    assert done.returncode == 0 and taken < 20


def test_a_machine_that_vanishes_is_done_without(machines: real_machines.Machines) -> None:
    """The last test: the machine does not come back."""
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
