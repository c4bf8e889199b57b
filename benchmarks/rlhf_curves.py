"""Rewards of PPO and GRPO on the toy task of examples/rlhf, by number of ranks and ZeRO stage: one curve.

Every run takes the same rows in batches of the same global size, and samples with noise that belongs to a row, so that
curves differ by rounding alone. Runs that are in the folder already are not repeated.

    ../clients/bin/python benchmarks/rlhf_curves.py --save cpu
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import FOLDER, progress
from report import Report, common_arguments

GOAL = 0.01  # largest difference of a reward, of the range of rewards
SCRIPT = FOLDER.parent / "examples" / "rlhf" / "train.py"
BATCHES = {
    "--per_device_train_batch_size": 16,
    "--per_device_generation_batch_size": 32,
    "--per_device_training_batch_size": 16,
}
"""Over all ranks."""

Curves = dict[str, list[dict[str, float]]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Rewards of RLHF by ranks and stage.")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3], choices=range(4))
    parser.add_argument("--kinds", nargs="+", default=["ppo", "grpo"])
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--folder", type=Path, default=Path("runs/rlhf_curves"), help="of finished runs")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.ranks, arguments.stages, arguments.kinds, arguments.iterations = [1, 2], [3], ["grpo"], 2
    return arguments


def curves_of(arguments: argparse.Namespace, ranks: int, stage: int) -> Curves:
    name = f"{ranks}_ranks_stage_{stage}_{arguments.iterations}_{'_'.join(arguments.kinds)}"
    folder = arguments.folder.absolute() / name
    if not (folder / "curves.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        run(arguments, folder, ranks, stage)
    return json.loads((folder / "curves.json").read_text())


def run(arguments: argparse.Namespace, folder: Path, ranks: int, stage: int) -> None:
    options = [f"{name}={size // ranks}" for name, size in BATCHES.items()]
    stages = [f"--{which}zero_stage={stage}" for which in ("", "actor_", "critic_")]
    short = ["--sft_steps=10", "--reward_steps=4"] if arguments.quick else []
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), str(SCRIPT)),
        *(*options, *stages, *short, f"--iterations={arguments.iterations}", f"--output_dir={folder}"),
        *("--run", *arguments.kinds),
    ]
    log = folder / "log"
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ})
    if done.returncode:
        raise SystemExit(f"{ranks} ranks at stage {stage} failed:\n{log.read_text()[-4000:]}")


def rewards(curve: list[dict[str, float]]) -> list[float]:
    return [point["reward"] for point in curve]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("rlhf_curves", arguments)
    runs = [(ranks, stage) for stage in arguments.stages for ranks in arguments.ranks]
    found: dict[tuple[int, int], Curves] = {}
    for number, each in enumerate(runs):
        progress(f"run {number + 1} of {len(runs)}: {each[0]} ranks, stage {each[1]}")
        found[each] = curves_of(arguments, *each)
    first = found[runs[0]]
    report.data["curves"] = {f"{ranks} ranks, stage {stage}": found[ranks, stage] for ranks, stage in runs}
    for kind in arguments.kinds:
        report.table(
            f"{kind.upper()}: score of the toy task (1 is the best), mean of each batch of answers",
            ["run", "first", "last", "best", "largest difference", "goal", "KL at the end"],
            [row(each, found[each][kind], first[kind]) for each in runs],
        )
    report.save()


def row(which: tuple[int, int], curve: Any, reference: Any) -> list[str]:
    mine, other = rewards(curve), rewards(reference)
    span = max(other) - min(other) or 1.0
    difference = max(abs(a - b) for a, b in zip(mine, other, strict=True)) / span
    return [
        f"{which[0]} ranks, stage {which[1]}",
        f"{mine[0]:.4f}",
        f"{mine[-1]:.4f}",
        f"{max(mine):.4f}",
        f"{difference:.2%}",
        f"<= {GOAL:.0%}",
        f"{curve[-1]['kl']:.3f}",
    ]


if __name__ == "__main__":
    main()
