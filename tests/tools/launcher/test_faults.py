"""One rank fails while the others wait for it: the job is over at once, and says who it was and why."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.tools.launcher.programs import COMMAND, TIMEOUT_S, deepspeed, environment

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the Linux kernel's help")

# Every rank waits for every other one in each step: in collectives, at stage 3 also for slices of the parameters.
SCRIPT = """\
import argparse, ctypes, os, signal, sys, time
import torch
import deepspeed

parser = argparse.ArgumentParser()
for name in ("--local_rank", "--culprit"):
    parser.add_argument(name, type=int)
parser.add_argument("--fault")
args = deepspeed.add_config_arguments(parser).parse_args()
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())


def fail():
    open("failed", "w").write(repr(time.time()))
    match args.fault:
        case "raise":
            raise ZeroDivisionError("out of luck")
        case "finally":  # the others notice before this rank's exception has left the script
            try:
                raise ZeroDivisionError("out of luck")
            finally:
                torch.distributed.destroy_process_group()
                time.sleep(0.5)
        case "exit":
            sys.exit(3)
        case "leave":
            sys.exit(0)
        case "text":
            raise SystemExit("out of luck")
        case "thread":  # keeps the process, as a logger's thread does that uploads its last lines
            import threading

            threading.Thread(target=time.sleep, args=(300,)).start()
            raise ZeroDivisionError("out of luck")
        case "os._exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            ctypes.string_at(0)


for step in range(1000):
    loss = engine(torch.ones(2, 16)).pow(2).mean()
    if step == 3 and engine.global_rank == args.culprit:
        fail()
    engine.backward(loss)
    engine.step()
"""
HOW = {
    "raise": (1, "ZeroDivisionError: out of luck (exit code 1)"),
    "finally": (1, "ZeroDivisionError: out of luck (exit code 1)"),
    "exit": (3, "exit code 3"),
    "leave": (1, "exited with code 0 while others were training"),
    "text": (1, "out of luck (exit code 1)"),
    "thread": (1, "ZeroDivisionError: out of luck (exit code 1)"),
    "os._exit": (3, "exit code 3"),
    "kill": (137, "killed by SIGKILL"),
    "segv": (139, "killed by SIGSEGV"),
}
LIMIT_S = 20.0  # far from every timeout, and from what a busy machine needs


def over_at_once(folder, stage: int, fault: str, culprit: int, ranks: int = 2) -> float:
    """Runs the script; returns how many seconds after the fault the command ended."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    (folder / "ds.json").write_text(json.dumps(config))
    (folder / "train.py").write_text(SCRIPT)
    options = ("--deepspeed_config", "ds.json", "--fault", fault, "--culprit", culprit)
    result = deepspeed("--num_gpus", ranks, "train.py", *options, cwd=folder)
    took_s = time.time() - float((folder / "failed").read_text())
    code, how = HOW[fault]
    assert result.returncode == code, result.stderr
    failed = "" if fault == "leave" else "failed first: "
    assert f"rank {culprit} of train.py {failed}{how}" in result.stderr, result.stderr
    # One that leaves is no failure, which would end the others: they end once they miss it.
    assert took_s < LIMIT_S or fault == "leave", result.stderr
    if fault in ("raise", "thread"):
        assert result.stderr.count("Traceback (most") == 1 and "pair.cc" not in result.stderr
    if fault == "text":
        assert result.stderr.count("out of luck\n") == 1
    return took_s


@pytest.mark.parametrize(
    "stage, fault, culprit",
    [(1, "leave", 1), (3, "segv", 0), (2, "thread", 1)],  # the others: the next test
)
def test_the_rank_that_failed_is_named_at_once(tmp_path, stage, fault, culprit):
    over_at_once(tmp_path, stage, fault, culprit)


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(HOW))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("attempt", range(3))
def test_every_fault_at_every_stage(tmp_path, stage, fault, attempt):
    culprit, ranks = [(0, 2), (1, 2), (1, 3)][attempt]
    print(f"{over_at_once(tmp_path, stage, fault, culprit, ranks):.1f} s")


STOPS = """\
import os, signal, sys
import torch
import deepspeed

deepspeed.init_distributed("gloo")
rank, when = int(os.environ["RANK"]), sys.argv[-1]
if rank == 1 and when == "before an engine":
    os.kill(os.getpid(), signal.SIGSTOP)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD"},
    "comm": {"hang_report_seconds": 1.0},
}
engine = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
engine.backward(engine(torch.ones(2, 4)).mean())
engine.step()
"""


@pytest.mark.parametrize(
    "when", ["before an engine", pytest.param("at its first step", marks=pytest.mark.slow)]
)
def test_a_rank_stopped_in_its_first_second_is_said_to_be_stopped(tmp_path, when):
    (tmp_path / "train.py").write_text(STOPS)
    command = [*COMMAND, "--num_gpus", "2", "train.py", when]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(TIMEOUT_S, process.kill)
        timer.start()
        said = next((line for line in process.stdout if "missing: rank 1" in line), "")
        timer.cancel()
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert re.search(r"missing: rank 1 \(.*, process \d+\) is stopped .*: kill -CONT \d+", said), said
