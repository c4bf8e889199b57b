"""Rewards of PPO and GRPO on the toy task of examples/rlhf, by number of ranks and ZeRO stage: one curve.

Every run takes the same rows in batches of the same global size, and samples with noise that belongs to a row, so that
curves differ by rounding alone. That of fp32 changes a token sooner or later, and from there on what is learned from:
its curves are compared smoothed too, as means of five batches. That of fp64 is too small to change a token, so that its
curves show whether all ranks and stages compute the same. Runs that are in the folder already are not repeated.

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
SMOOTH = 5  # batches
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
    parser.add_argument("--dtypes", nargs="+", default=["fp64", "fp32"], choices=["fp64", "fp32"])
    parser.add_argument("--kinds", nargs="+", default=["ppo", "grpo"])
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--folder", type=Path, default=Path("runs/rlhf_curves"), help="of finished runs")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.ranks, arguments.stages, arguments.kinds, arguments.iterations = [1, 2], [3], ["grpo"], 2
        arguments.dtypes = ["fp64"]
    return arguments


def curves_of(arguments: argparse.Namespace, dtype: str, ranks: int, stage: int) -> Curves:
    name = f"{dtype}_{ranks}_ranks_stage_{stage}_{arguments.iterations}_{'_'.join(arguments.kinds)}"
    folder = arguments.folder.absolute() / name
    if not (folder / "curves.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        run(arguments, folder, dtype, ranks, stage)
    return json.loads((folder / "curves.json").read_text())


def run(arguments: argparse.Namespace, folder: Path, dtype: str, ranks: int, stage: int) -> None:
    options = [f"{name}={size // ranks}" for name, size in BATCHES.items()]
    stages = [f"--{which}zero_stage={stage}" for which in ("", "actor_", "critic_")]
    short = ["--sft_steps=10", "--reward_steps=4"] if arguments.quick else []
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), str(SCRIPT)),
        *(*options, *stages, *short, f"--iterations={arguments.iterations}", f"--output_dir={folder}"),
        f"--dtype={dtype}",
        *("--run", *arguments.kinds),
    ]
    log = folder / "log"
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ})
    if done.returncode:
        raise SystemExit(f"{ranks} ranks at stage {stage} failed:\n{log.read_text()[-4000:]}")


def rewards(curve: list[dict[str, float]]) -> list[float]:
    return [point["reward"] for point in curve]


def smooth(values: list[float]) -> list[float]:
    """Means of so many values in a row."""
    count = min(SMOOTH, len(values))
    return [sum(values[at : at + count]) / count for at in range(len(values) - count + 1)]


def difference(mine: list[float], other: list[float]) -> float:
    """The largest one, of the range of the other one."""
    return max(abs(a - b) for a, b in zip(mine, other, strict=True)) / (max(other) - min(other) or 1.0)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("rlhf_curves", arguments)
    for dtype in arguments.dtypes:
        compare(arguments, report, dtype)
    report.save()


def compare(arguments: argparse.Namespace, report: Report, dtype: str) -> None:
    runs = [(ranks, stage) for stage in arguments.stages for ranks in arguments.ranks]
    found: dict[tuple[int, int], Curves] = {}
    for number, each in enumerate(runs):
        progress(f"{dtype}, run {number + 1} of {len(runs)}: {each[0]} ranks, stage {each[1]}")
        found[each] = curves_of(arguments, dtype, *each)
    first = found[runs[0]]
    report.data[dtype] = {f"{ranks} ranks, stage {stage}": found[ranks, stage] for ranks, stage in runs}
    names = ["run", "first", "last", "best", "largest difference", "goal", "of smoothed curves", "last KL"]
    for kind in arguments.kinds:
        report.table(
            f"{kind.upper()}, {dtype}: score of the toy task (1 is the best), mean of each batch of answers",
            names,
            [row(each, found[each][kind], first[kind]) for each in runs],
        )


def row(which: tuple[int, int], curve: Any, reference: Any) -> list[str]:
    mine, other = rewards(curve), rewards(reference)
    return [
        f"{which[0]} ranks, stage {which[1]}",
        f"{mine[0]:.4f}",
        f"{mine[-1]:.4f}",
        f"{max(mine):.4f}",
        f"{difference(mine, other):.2%}",
        f"<= {GOAL:.0%}",
        f"{difference(smooth(mine), smooth(other)):.2%}",
        f"{curve[-1]['kl']:.3f}",
    ]


if __name__ == "__main__":
    main()
