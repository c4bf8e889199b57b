"""Starting the real command on small scripts, for the tests in this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "deepspeed.tools.launcher.runner"]
TIMEOUT_S = 180
OF_LAUNCHER = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "GOMP_SPINCOUNT",
}

# A script as a user writes it: a small model, an engine, three steps, a checkpoint. Rank 1 may die in the second step.
TRAIN = """\
import argparse, datetime, os, signal
import torch
import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--load")
parser.add_argument("--death", default="none")
parser.add_argument("--timeout", type=float, default=600.0)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed(timeout=datetime.timedelta(seconds=args.timeout))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
if args.load:
    engine.load_checkpoint(args.load, tag="step")
for step in range(3):
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 8, device=engine.device)).pow(2).mean()
        engine.backward(loss)
        if step == 1 and engine.global_rank == 1 and args.death == "raise":
            raise ZeroDivisionError("rank one is out of luck")
        if step == 1 and engine.global_rank == 1 and args.death == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step()
    if step == 0:
        engine.save_checkpoint("checkpoint", tag="step")
print("done", flush=True)
"""
CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}


def environment(**changes: str) -> dict[str, str]:
    """This process's, without what a launcher above may have set, and with the package under test first."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHER}
    return {
        **kept,
        "PYTHONPATH": str(REPOSITORY),
        "DS_ACCELERATOR": "cpu",
        "PYTHONFAULTHANDLER": "1",
        **changes,
    }


def deepspeed(*arguments: object, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs `deepspeed` with these arguments to its end."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment(**changes), capture_output=True, text=True, timeout=TIMEOUT_S
    )
