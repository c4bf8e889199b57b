from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import deepspeed.base
from deepspeed.base import logging as ds_logging
from deepspeed.base.logging import LoggerFactory, log_dist, log_dist_once, logger, print_dist, warning_once
from tests import forked
from tests.pool import distributed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def at_info() -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(before)


def test_the_logger_is_one_and_keeps_to_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert logger is deepspeed.utils.logger is logging.getLogger("DeepSpeed")
    assert logger.name == "DeepSpeed" and not logger.propagate and logger.level == logging.WARNING
    logger.info("not shown")
    logger.warning("shown")
    out, err = capsys.readouterr()
    assert "shown" in out and "not shown" not in out and err == ""
    assert "[WARNING] [test_logging.py:" in out


def test_raising_the_level_is_enough(at_info: None, capsys: pytest.CaptureFixture[str]) -> None:
    logger.info("now shown")
    assert "now shown" in capsys.readouterr().out


def test_making_a_logger_twice_adds_no_second_handler() -> None:
    first = LoggerFactory.create_logger("ds test", logging.ERROR)
    assert LoggerFactory.create_logger("ds test") is first and len(first.handlers) == 1
    with pytest.raises(ValueError, match="name"):
        LoggerFactory.create_logger()


def test_ranks(at_info: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")  # before a process group exists
    for ranks in (None, [-1], [2], {0, 2}):
        log_dist(f"yes {ranks}", ranks=ranks)
    for ranks in ([0], [], range(2)):
        log_dist(f"no {ranks}", ranks=ranks)
        print_dist(f"no {ranks}", ranks=ranks)
    print_dist("printed", ranks=[2])
    out = capsys.readouterr().out
    assert out.count("[Rank 2] yes") == 4 and "no" not in out and "[Rank 2] printed" in out
    assert "[test_logging.py:" in out  # the caller's line, not ours


def test_once(at_info: None, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        warning_once("a warning of this test")
        log_dist_once("an info of this test", ranks=[0])
        log_dist_once("another info of this test", ranks=[0], level=logging.DEBUG)
    out = capsys.readouterr().out
    assert out.count("a warning of this test") == 1 and out.count("an info of this test") == 1
    assert "another" not in out
    log_dist_once("another info of this test", ranks=[0])  # what was too quiet to be seen has not been said
    assert "another" in capsys.readouterr().out


def test_levels(at_info: None) -> None:
    ds_logging.set_log_level_from_string("Error")
    assert logger.level == logging.ERROR
    other = logging.getLogger("ds other")
    ds_logging.set_log_level_from_string("debug", other)
    assert other.level == logging.DEBUG
    with pytest.raises(ValueError, match=r"'trace'.*debug, info, warning, error, critical"):
        ds_logging.set_log_level_from_string("trace")


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "message.json"
    ds_logging.print_json_dist({"a": 1}, ranks=[0], path=str(path))
    assert json.loads(path.read_text()) == {"a": 1, "rank": 0}
    ds_logging.print_json_dist({"a": 2})
    ds_logging.print_json_dist({"a": 3}, ranks=[1])
    assert json.loads(capsys.readouterr().out) == {"a": 2, "rank": 0}


def test_configuration(at_info: None, capsys: pytest.CaptureFixture[str]) -> None:
    ds_logging.print_configuration(
        type("Args", (), {"__init__": lambda self: setattr(self, "lr", 3)})(), "args"
    )
    out = capsys.readouterr().out
    assert "args:" in out and "lr ..........................." in out


@distributed(world_size=2)
def test_ranks_of_the_process_group() -> None:
    assert ds_logging.get_dist_msg("m", [1]) == (
        f"[Rank {dist.get_rank()}] m" if dist.get_rank() == 1 else None
    )
    assert ds_logging.is_rank_zero() == (dist.get_rank() == 0)


def test_quiet_while_compiling() -> None:
    code = """
import torch
from deepspeed.base.logging import logger
@torch.compile(backend="eager", fullgraph=True)
def f(x):
    logger.info("quiet")
    logger.warning("quiet")
    return x + 1
f(torch.ones(2))
logger.error("loud")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DISABLE_LOGS_WHILE_COMPILING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "loud" in done.stdout and "quiet" not in done.stdout


BAR = """
import os, sys
from tqdm import tqdm
from deepspeed.base.logging import logger
if sys.argv[1] == "pipe":
    end, sink = os.pipe()
else:
    sink, end = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), os.open(sys.argv[1], os.O_RDONLY)
screen = os.dup(1)
os.dup2(sink, 1), os.dup2(sink, 2)
for step in tqdm(range(3), file=sys.stderr, mininterval=0, ncols=40):
    logger.warning("line %d", step)
    logger.warning("again %d", step)
logger.warning("the end")
os.write(screen, os.read(end, 1 << 16))
"""


@pytest.mark.parametrize("sink", ["log", "pipe"])
def test_a_log_line_never_shares_its_line_with_a_bar(sink: str, tmp_path: Path) -> None:
    """Output and errors in one file, as `python train.py > log 2>&1` has them, or in one pipe."""
    done = forked.run(["-c", BAR, sink], env=dict(os.environ), cwd=tmp_path)
    lines = done.stdout.split("\n")
    logged = [line for line in lines if "WARNING" in line]
    assert len(logged) == 7 and all(line.startswith("[2") for line in logged), lines
    assert sum("%|" in line for line in lines) >= 2 and "" not in lines[:-2], lines
