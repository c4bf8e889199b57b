"""Step time of a GPT on one CUDA GPU: DDP against ours at stages 0 to 2 (NCCL, one rank), and the peer.

NOT YET RUN: written where there was no GPU. One rank moves no gradient over a link, so this shows what the
engine and its kernels add on a device, not how communication scales.

    python benchmarks/gpu/train_step.py --peer ../peer/bin/python --save h200
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs import OURS, Contender, Spread, ratios, round_robin, started
from report import Report, common_arguments


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Step time relative to DDP on one CUDA GPU (not yet run).")
    parser.add_argument("--model", default="350M", choices=["tiny", "50M", "350M"])
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2], choices=range(4))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.model, arguments.batch, arguments.context, arguments.rounds = "tiny", 1, 256, 2
    return arguments


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    def row(name: str, system: str, stage: int = 0, python: str = OURS) -> Contender:
        options = {
            "system": system,
            "stage": stage,
            "device": "cuda",
            **{key: getattr(arguments, key) for key in ("model", "precision", "batch", "context")},
        }
        return Contender(name, "trainers:Trainer", options, python=python, ranks=1)

    rows = [row("DDP", "ddp")] + [row(f"ours, stage {s}", "engine", s) for s in arguments.stages]
    if arguments.peer:
        rows += [row(f"peer, stage {s}", "engine", s, arguments.peer) for s in arguments.stages]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    os.environ["DS_ACCELERATOR"] = "cuda"
    report = Report("gpu_train_step", arguments)
    rows = contenders(arguments)
    with started(rows) as jobs:
        seconds = round_robin(jobs, arguments.rounds, lambda job: job.call("run", steps=arguments.steps)[0])
        peaks = {name: job.call("peak_memory")[0] for name, job in jobs.items()}
    cells = [
        [
            row.name,
            f"{Spread.of(seconds[row.name]).median * 1e3:.2f}",
            ratios(seconds[row.name], seconds["DDP"]).show(),
            f"{peaks[row.name] / 2**30:.2f}",
        ]
        for row in rows
    ]
    report.table(
        f"{arguments.model} GPT, {arguments.precision}, {arguments.batch} x {arguments.context}, one GPU",
        ["", "ms/step", "ratio to DDP, median [min .. max]", "peak GiB"],
        cells,
    )
    report.data["seconds"], report.data["peak_bytes"] = seconds, peaks
    report.save()


if __name__ == "__main__":
    main()
