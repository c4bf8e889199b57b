"""A run that loses ranks continues as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deepspeed.checkpoint.replicas import ReplicaState, ReplicaTransfer, missing, newest_complete
from tests.pool import run
from tests.tools.elastic import elastic_run
from tests.tools.launcher import fake_machines
from tests.tools.launcher.programs import COMMAND, TIMEOUT_S, environment

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the Linux kernel's help")

STEPS = 8
SCRIPT = str(Path(elastic_run.__file__))


def config(stage: int, **elasticity: Any) -> dict[str, Any]:
    section = {"enabled": True, "version": 0.1, "max_train_batch_size": 8, "micro_batch_sizes": [1, 2]}
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.1,
        "elasticity": {**section, "min_gpus": 1, "max_gpus": 8, "replicate_state": True, **elasticity},
    }


def started(folder: Path, settings: dict[str, Any], *options: str, ranks: int, steps: int = STEPS) -> Any:
    command = [*COMMAND, "--elastic_training", "--num_gpus", str(ranks), "--no_local_rank"]
    return subprocess.Popen(
        [*command, SCRIPT, str(folder), json.dumps(settings), str(steps), *options],
        cwd=folder,
        env=environment(DEEPSPEED_ELASTIC_MEMORY=str(folder / "memory")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path


def undisturbed(folder: Path, settings: dict[str, Any], ranks: int, steps: int = STEPS) -> Any:
    """The same run in the pool of ranks, which no one disturbs."""
    (folder / "calm").mkdir()
    run(elastic_run.train, ranks, folder=folder / "calm", config=settings, steps=steps)
    return elastic_run.read(folder / "calm")[1]


def check_loss_of_a_rank(folder: Path, stage: int, ranks: int) -> float:
    """Returns the seconds from the death of a rank to the first step after it."""
    settings = config(stage)
    job = started(folder, settings, f"death={ranks - 1}:4", ranks=ranks)
    said, _ = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, said
    assert f"rank {ranks - 1} of {SCRIPT} failed first: killed by SIGKILL" in said
    starts, made = elastic_run.read(folder)
    assert [start["began"] for start in starts] == [0] * ranks + [4] * ranks  # no finished step was lost
    assert made == undisturbed(folder, settings, ranks)  # losses bit for bit, and the same samples
    assert list((folder / "memory").iterdir()) == []
    died = float((folder / "died").read_text())
    after = [json.loads(line) for line in (folder / "rank0").read_text().splitlines()]
    return min(record["at"] for record in after if record["at"] > died and record.get("step") == 4) - died


def test_a_killed_rank_costs_no_finished_step(folder: Path) -> None:
    check_loss_of_a_rank(folder, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_of_four_ranks(folder: Path, stage: int) -> None:
    assert check_loss_of_a_rank(folder, stage, 4) < 10


@pytest.mark.slow
def test_a_script_that_fails_before_its_first_step_is_not_started_again(folder: Path) -> None:
    settings = config(1) | {"optimizer": {"type": "NoSuch"}}
    job = started(folder, settings, ranks=1)
    said, _ = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 1 and said.count("Traceback") == 1
    assert "restarted" not in said and list((folder / "memory").iterdir()) == []


@pytest.mark.slow
def test_a_run_that_does_not_get_on_ends(folder: Path) -> None:
    """It dies in the first step, but one step had been made: three starts in vain."""
    (folder / "train.py").write_text(
        "import os, struct, pathlib\n"
        "pathlib.Path(os.environ['DEEPSPEED_ELASTIC_STATE'], 'progress').write_bytes(struct.pack('<q', 5))\n"
        "open('starts', 'a').write('x')\n"
        "raise ValueError('boom')\n"
    )
    result = subprocess.run(
        [*COMMAND, "--elastic_training", "--num_gpus", "1", "train.py"],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert result.returncode == 1
    assert (folder / "starts").read_text() == "x" * 4  # the first, which got on, and three in vain
    assert "boom" in result.stderr.splitlines()[-1]


# Several machines ------------------------------------------------------------------------------------------


def until(happens: Any, job: Any) -> None:
    limit = time.monotonic() + TIMEOUT_S
    while not happens():
        assert job.poll() is None and time.monotonic() < limit
        time.sleep(0.05)


def of_step(ranks: dict[int, list[Any]]) -> list[int]:
    return sorted(sample for batches in ranks.values() for samples, _ in batches for sample in samples)


@pytest.mark.slow
def test_machines_go_and_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines with one rank each, by stand-ins for ssh: one is lost, the other continues; later there are two
    again."""
    psutil = pytest.importorskip("psutil")
    fake_machines.install(folder / "bin")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (folder / "hosts").write_text("worker-0 slots=1\nworker-1 slots=1\n")
    settings, steps = config(2), 400
    where = ["--hostfile", "hosts", "--master_addr", "127.0.0.1", "--launcher", "ssh", "--no_local_rank"]
    script = [SCRIPT, str(folder), json.dumps(settings), str(steps), "pause=0.1"]
    job = subprocess.Popen(
        [*COMMAND, "--elastic_training", *where, *script],
        cwd=folder,
        env=environment(
            DEEPSPEED_ELASTIC_MEMORY=str(folder / "memory"), FAKE_LOG=str(folder / "calls"), HOME=str(folder)
        ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: len(elastic_run.read(folder)[1]) > 3, job)
        clients = [p for p in psutil.Process(job.pid).children() if "worker-1" in p.cmdline()]
        clients[0].kill()
        until(lambda: [start["size"] for start in elastic_run.read(folder)[0]] == [2, 2, 1], job)
        until(lambda: [start["size"] for start in elastic_run.read(folder)[0]] == [2, 2, 1, 2, 2], job)
        starts, made = elastic_run.read(folder)
        until(lambda: len(elastic_run.read(folder)[1]) > starts[-1]["began"] + 3, job)
    finally:
        job.send_signal(signal.SIGTERM)
        print(job.communicate(timeout=TIMEOUT_S)[1])
    starts, made = elastic_run.read(folder)
    last = max(made) - 1
    calm = undisturbed(folder, settings, 2, last)
    for step in range(last):
        samples, expected = (
            sorted(s for rank in each[step].values() for b in rank for s in b[0]) for each in (made, calm)
        )
        assert samples == expected and len(samples) == 8, step
    alone = range(starts[2]["began"], starts[3]["began"])
    # One rank takes as many samples as two did.
    assert all(len(made[step]) == 1 and len(made[step][0]) == 4 for step in alone)


def test_the_newest_whole_state() -> None:
    two, three = {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}
    machines = {
        0: {"global_step2": ReplicaState(two, three, 2), "global_step3": ReplicaState({"a": 1}, three, 3)},
        2: {"global_step2": ReplicaState({"c": 3}, three, 2)},
    }
    assert newest_complete(machines) == ("global_step2", three)  # of step 3, b and c are lost
    machines[1] = {"global_step3": ReplicaState({"b": 2, "c": 3}, three, 3)}
    assert newest_complete(machines) == ("global_step3", three)
    assert newest_complete({}) is None
    machines[1] = {"global_step3": ReplicaState({"b": 2, "c": 1}, three, 3)}  # c was cut short
    assert newest_complete(machines) == ("global_step2", three)


def test_every_machine_gets_what_it_lacks() -> None:
    have = {0: {"a": 1, "b": 2}, 4: {"b": 2}, 8: {}}
    assert missing({"a": 1, "b": 2}, have) == [
        ReplicaTransfer("a", 1, 0, 4),
        ReplicaTransfer("a", 1, 0, 8),
        ReplicaTransfer("b", 2, 0, 8),
    ]
    # Machine 0 has another one of this name.
    assert missing({"a": 1}, {0: {"a": 7}, 1: {"a": 1}}) == [ReplicaTransfer("a", 1, 1, 0)]
