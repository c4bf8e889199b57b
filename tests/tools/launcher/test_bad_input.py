"""Errors on the command line: a message that names the mistake, once, and an exit code."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess

import pytest

from deepspeed.tools.launcher import ports
from tests import forked
from tests.tools.launcher.programs import CONFIG, TIMEOUT_S, TRAIN, deepspeed, environment


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def write_config(folder, **changes) -> None:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "ds.json").write_text(json.dumps(config))


def train(folder, *arguments, ranks: int = 2, options=(), env=None, **changes):
    """Trains with the config, changed; two ranks unless told otherwise."""
    write_config(folder, **changes)
    given = ["--num_gpus", ranks, *options, "train.py", "--deepspeed_config", "ds.json", *arguments]
    return deepspeed(*given, cwd=folder, **(env or {}))


def summary(result: subprocess.CompletedProcess[str]) -> str:
    """The line in which the launcher says who failed first, and of what."""
    (line,) = (line for line in result.stderr.splitlines() if "failed first" in line)
    return line


@pytest.mark.slow
def test_good_input(folder):
    """The script and the config are right: what the others find wrong is what they put there."""
    result = train(folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done") == 2


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"zero_optimization": {"stge": 2}}, "stge"),
        ({"optimizer": {"type": "Adan", "params": {}}}, "Adan"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16"),
    ],
)
def test_wrong_config(folder, changes, named):
    result = alone(folder, **changes)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert named in result.stderr and "done" not in result.stdout


def test_two_mistakes_come_together(folder):
    """And once, although two ranks find them."""
    result = train(folder, gradient_clipping="much", zero_optimization={"stage": 5})
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert "gradient_clipping" in result.stderr and "zero_optimization.stage" in result.stderr
    assert "gradient_clipping" in summary(result) and "(and 1 more)" in summary(result)


def test_config_that_is_not_there_or_no_json(folder):
    missing = forked.run(["train.py", "--deepspeed_config", "nosuch.json"], cwd=folder, env=environment())
    assert missing.returncode == 1 and "nosuch.json" in missing.stderr
    (folder / "ds.json").write_text('{"train_batch_size": 4,, }')
    broken = forked.run(["train.py", "--deepspeed_config", "ds.json"], cwd=folder, env=environment())
    assert broken.returncode == 1 and "ds.json" in broken.stderr
    assert "done" not in missing.stdout + broken.stdout


def test_world_size_that_does_not_divide_the_batch(folder):
    result = train(folder, ranks=3)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert re.search(r"train_batch_size.*\b4\b", result.stderr) and re.search(r"\b3\b", result.stderr)
    assert "done" not in result.stdout


@pytest.mark.parametrize("stage, death, code, said", [
    (0, "raise", 1, "ZeroDivisionError: rank one is out of luck (exit code 1)"),
    (2, "kill", 137, "killed by SIGKILL"),
    pytest.param(3, "kill", 137, "killed by SIGKILL", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_rank_that_dies_in_training(folder, stage, death, code, said):
    result = train(folder, "--death", death, zero_optimization={"stage": stage})
    assert result.returncode == code, result.stderr
    assert f"rank 1 of train.py failed first: {said}" in result.stderr
    assert result.stderr.count("Traceback") <= 1
    after = alone(folder, "--load", "checkpoint", zero_optimization={"stage": stage})
    assert after.returncode == 0, after.stderr  # what was saved before is there


def test_checkpoint_that_is_not_there(folder):
    result = alone(folder, "--load", "checkpoint")
    assert result.returncode == 1
    assert "CheckpointNotFoundError: the checkpoint folder checkpoint does not exist" in result.stderr
    assert result.stderr.count("Traceback") == 1


def test_port_in_use_under_the_command(folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = train(folder, options=("--master_port", port))
    assert result.returncode == 2
    assert result.stderr.startswith(f"[deepspeed] error: --master_port={port} is in use")
    assert "Traceback" not in result.stderr


def alone(folder, *arguments: str, env=None, **changes) -> subprocess.CompletedProcess[str]:
    """The script as one process; an environment may be as another launcher would have set it."""
    write_config(folder, **changes)
    command = ["train.py", "--deepspeed_config", "ds.json", *arguments]
    return forked.run(command, cwd=folder, env=environment(**(env or {})), timeout=TIMEOUT_S)


FIRST_OF_TWO = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def test_port_in_use_without_the_command(folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        result = alone(folder, env={**FIRST_OF_TWO, "MASTER_PORT": port})
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-2]
    assert f"MASTER_PORT={port}" in last and "is currently free" in last


def test_a_rank_that_never_comes(folder):
    """WORLD_SIZE says two and one is there: the wait ends with the timeout, and says who is missing."""
    port = str(ports.find_free("127.0.0.1"))
    result = alone(folder, "--timeout", "3", env={**FIRST_OF_TWO, "MASTER_PORT": port})
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-2]
    assert "1 of 2" in last or "1/2" in last, result.stderr


def test_environment_that_is_incomplete(folder):
    result = alone(folder, env={"RANK": "0", "WORLD_SIZE": "2"})
    assert result.returncode != 0
    assert "MASTER_ADDR" in result.stderr.strip().splitlines()[-1] or os.environ.get("MASTER_ADDR")
