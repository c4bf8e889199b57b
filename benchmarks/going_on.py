"""How long a run stands still when one of its ranks is killed, and what keeping its state in memory costs.

    python benchmarks/going_on.py [--ranks 4] [--stages 1 2 3] [--width 1024] [--save 4_ranks]

The victim is killed with SIGKILL in the middle of a step. Still: from then to the end of the first step that is made
again, with the start of new processes in between. What a state costs is told by steps with and without it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from jobs import progress
from report import Report, common_arguments

GOAL = 10.0  # seconds
STEPS, VICTIM_AT = 12, 6
RANK = """
import json, os, sys, time
import torch
import deepspeed

folder, config, width, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)])
engine = deepspeed.initialize(model=model, config=config)[0]
with open(f"{folder}/rank{engine.global_rank}", "a") as log:
    log.write(json.dumps({"pid": os.getpid(), "began": engine.global_steps, "at": time.time()}) + "\\n")
    while engine.global_steps < steps:
        torch.manual_seed(engine.global_steps)
        loss = engine(torch.randn(2, width)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        log.write(json.dumps({"step": engine.global_steps, "loss": loss.item(), "at": time.time()}) + "\\n")
        log.flush()
"""


def main() -> None:
    parser = common_arguments("From kill -9 of a rank to the next finished step.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    report = Report("going_on", args)
    rows = []
    for stage in args.stages[:1] if args.quick else args.stages:
        progress(f"stage {stage}")
        calm, _, _ = run(args, stage, replicate=False, kill=False)
        kept, _, _ = run(args, stage, replicate=True, kill=False)
        disturbed, died, began = run(args, stage, replicate=True, kill=True)
        again = min(record["at"] for record in disturbed if record["at"] > died and record["step"] > began)
        # rank 0 may write down a step later than the victim, which is dead by then
        before = max(began, *(record["step"] for record in disturbed if record["at"] < died))
        same = losses(calm) == losses(disturbed)
        row = [f"{stage}", f"{again - died:.2f}", f"{GOAL:.0f}", f"{before - began}", "yes" if same else "NO"]
        rows.append([*row, f"{step_ms(calm):.1f}", f"{step_ms(kept):.1f}"])
        report.data[f"stage {stage}"] = {"still_s": again - died, "lost": before - began, "same": same}
    millions = 8 * args.width * (args.width + 1) / 1e6
    report.table(
        f"{args.ranks} ranks, {millions:.1f}M parameters, Adam, fp32: {12 * millions:.0f} MB of state",
        ["stage", "seconds still", "goal <=", "steps lost", "same losses", "ms/step", "with replicate_state"],
        rows,
    )
    report.save()


def run(
    args: argparse.Namespace, stage: int, *, replicate: bool, kill: bool
) -> tuple[list[dict[str, Any]], float, int]:
    """Rank 0's steps, when the victim died, and the step after which the run went on."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "elasticity": {"replicate_state": replicate},
        "steps_per_print": None,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rank.py").write_text(RANK)
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--elastic_training", "--no_local_rank"]
        job = subprocess.Popen(
            [*command, "--num_gpus", str(args.ranks), str(folder / "rank.py")]
            + [str(folder), json.dumps(config), str(args.width), str(STEPS)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "DS_ACCELERATOR": "cpu", "DEEPSPEED_PROGRESS": "0"},
        )
        died, victim = float("inf"), folder / f"rank{args.ranks - 1}"
        while kill and died == float("inf") and job.poll() is None:
            lines = victim.read_text().splitlines() if victim.exists() else []
            if len(lines) > VICTIM_AT:
                psutil.Process(json.loads(lines[0])["pid"]).send_signal(signal.SIGKILL)
                died = time.time()
            time.sleep(0.002)
        if job.wait():
            raise SystemExit(f"stage {stage}: the job ended with exit code {job.returncode}")
        records = [json.loads(line) for line in (folder / "rank0").read_text().splitlines()]
    starts = [record["began"] for record in records if "began" in record]
    return [record for record in records if "step" in record], died, starts[-1]


def losses(records: list[dict[str, Any]]) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records}


def step_ms(records: list[dict[str, Any]]) -> float:
    times = [record["at"] for record in records]
    return 1e3 * statistics.median(b - a for a, b in zip(times[2:], times[3:], strict=False))


if __name__ == "__main__":
    main()
