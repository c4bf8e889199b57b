"""Rewards of PPO and GRPO on the toy task of examples/rlhf, by number of ranks and ZeRO stage: one curve.

Every run takes the same rows in batches of the same global size, and samples with noise that belongs to a row, so that
curves differ by rounding alone. Three ways to compute: fp32 with --wide_sums in pieces of four rows, which rounds alike
on any number of ranks; fp64, whose rounding is too small to change a token; and fp32 with all rows of a rank at once,
whose rounding changes a token sooner or later, and from there on what is learned from. Curves are compared smoothed
too, as means of five batches. Runs that are in the folder already are not repeated.

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
from typing import Any, NamedTuple

from jobs import FOLDER, progress
from report import Report, common_arguments

GOAL = 0.01  # largest difference of a reward, of the range of rewards
SMOOTH = 5  # batches
SCRIPT = FOLDER.parent / "examples" / "rlhf" / "train.py"
TRAINED, ANSWERED = 16, 32
"""Rows of an update and of a batch of answers, over all ranks."""
PIECE = 4  # rows


class Way(NamedTuple):
    """How a run computes. ``wide``: in pieces, with gradients that are summed in fp64."""

    dtype: str
    wide: bool = False


WAYS = {"fp32, wide sums": Way("fp32", wide=True), "fp64": Way("fp64"), "fp32": Way("fp32")}

Curves = dict[str, list[dict[str, float]]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Rewards of RLHF by ranks and stage.")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3], choices=range(4))
    parser.add_argument("--ways", nargs="+", default=["fp32, wide sums", "fp64"], choices=list(WAYS))
    parser.add_argument("--kinds", nargs="+", default=["ppo", "grpo"])
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--folder", type=Path, default=Path("runs/rlhf_curves"), help="of finished runs")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.ranks, arguments.stages, arguments.kinds, arguments.iterations = [1, 2], [3], ["grpo"], 2
        arguments.ways = ["fp32, wide sums"]
    return arguments


def curves_of(arguments: argparse.Namespace, way: str, ranks: int, stage: int) -> Curves:
    label = way.replace(", ", "_").replace(" ", "_")
    name = f"{label}_{ranks}_ranks_stage_{stage}_{arguments.iterations}_{'_'.join(arguments.kinds)}"
    folder = arguments.folder.absolute() / name
    if not (folder / "curves.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        run(arguments, folder, WAYS[way], ranks, stage)
    found: Curves = json.loads((folder / "curves.json").read_text())
    pieces = sizes_of(WAYS[way], ranks)["--generation_batches"]
    return {
        kind: [mean(points[at : at + pieces]) for at in range(0, len(points), pieces)]
        for kind, points in found.items()
    }


def mean(points: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(point[name] for point in points) / len(points) for name in ("reward", "kl")}


def sizes_of(way: Way, ranks: int) -> dict[str, int]:
    """In batches of a rank that hold all its rows, or a piece of them."""
    trained, answered = TRAINED // ranks, ANSWERED // ranks
    if way.wide:
        trained = answered = PIECE
    return {
        "--per_device_train_batch_size": trained,
        "--per_device_training_batch_size": trained,
        "--gradient_accumulation_steps": TRAINED // ranks // trained,
        "--per_device_generation_batch_size": answered,
        "--generation_batches": ANSWERED // ranks // answered,
    }


def run(arguments: argparse.Namespace, folder: Path, way: Way, ranks: int, stage: int) -> None:
    sizes = sizes_of(way, ranks)
    options = [f"{name}={size}" for name, size in sizes.items()]
    options += ["--wide_sums"] if way.wide else []
    iterations = arguments.iterations * sizes["--generation_batches"]
    stages = [f"--{which}zero_stage={stage}" for which in ("", "actor_", "critic_")]
    short = ["--sft_steps=10", "--reward_steps=4"] if arguments.quick else []
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), str(SCRIPT)),
        *(*options, *stages, *short, f"--iterations={iterations}", f"--output_dir={folder}"),
        *(f"--dtype={way.dtype}", f"--num_answers={PIECE}"),
        *("--run", *arguments.kinds),
    ]
    log = folder / "log"
    with log.open("w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
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
    for way in arguments.ways:
        compare(arguments, report, way)
    report.save()


def compare(arguments: argparse.Namespace, report: Report, way: str) -> None:
    runs = [(ranks, stage) for stage in arguments.stages for ranks in arguments.ranks]
    found: dict[tuple[int, int], Curves] = {}
    for number, each in enumerate(runs):
        progress(f"{way}, run {number + 1} of {len(runs)}: {each[0]} ranks, stage {each[1]}")
        found[each] = curves_of(arguments, way, *each)
    first = found[runs[0]]
    report.data[way] = {f"{ranks} ranks, stage {stage}": found[ranks, stage] for ranks, stage in runs}
    names = ["run", "first", "last", "best", "largest difference", "goal", "of smoothed curves", "last KL"]
    for kind in arguments.kinds:
        report.table(
            f"{kind.upper()}, {way}: score of the toy task (1 is the best), mean of each batch of answers",
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
