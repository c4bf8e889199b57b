"""Another checkout and this one, in alternation: training steps, engine calls, start, checkpoints, decoding.

The other checkout takes the place of the peer in `train_step.py`, `engine_cost.py`, `start.py` and `checkpoint.py`,
whose drivers go round the contenders; decoding is the `generate` of `init_inference` with kernels. What runs
in both is this checkout's code of the benchmarks, through the public interface. After/before is of each round.

    python benchmarks/before_after.py --before ../before/.venv/bin/python --clients PYTHON BEFORE --save cpu2

`--clients`: interpreters with Transformers, of this checkout and of the other; without them nothing is decoded.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import checkpoint
import engine_cost
import start
import train_step
from jobs import Contender, Spread, ratios, round_robin, started
from report import Report, common_arguments

Samples = tuple[str, list[float], list[float]]
"""What was measured, in seconds, and its samples before and after."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Another checkout of this package and this one, side by side.")
    parser.add_argument("--before", metavar="PYTHON", required=True, help="interpreter of the other checkout")
    parser.add_argument(
        "--clients", metavar="PYTHON", nargs=2, help="with Transformers: this checkout's, the other's"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", default=list(MEASURED), choices=list(MEASURED))
    return parser.parse_args(argv)


def run(module: ModuleType, arguments: argparse.Namespace, *options: str) -> dict[str, Any]:
    """Run ``module`` with the other checkout as the peer; returns the data of its report."""
    rounds = ["--samples" if module is start else "--rounds", str(arguments.rounds)]
    quick = ["--quick"] if arguments.quick else [*rounds, "--stages", "0", "2", "3"]
    return module.main([*quick, *options, "--peer", arguments.before]).data


def pairs(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the other checkout and of this one."""
    yield from ((name.replace("ours", "peer"), name) for name in names if name.startswith("ours"))


def train_steps(arguments: argparse.Namespace) -> Iterator[Samples]:
    data = run(
        train_step, arguments, "--without", "fsdp2", "compute", "--sizes", "10M", "--precisions", "fp32"
    )
    for key, found in data.items():
        if isinstance(found, dict) and "DDP" in found:
            for before, after in pairs(list(found)):
                yield f"step, {key}, {after}", found[before]["seconds"], found[after]["seconds"]


def engine_costs(arguments: argparse.Namespace) -> Iterator[Samples]:
    found = run(engine_cost, arguments)["microseconds_per_step"]
    for before, after in pairs(list(found)):
        yield (
            f"step of a tiny MLP, {after}",
            [s / 1e6 for s in found[before]],
            [s / 1e6 for s in found[after]],
        )


def starts(arguments: argparse.Namespace) -> Iterator[Samples]:
    data = run(start, arguments)
    yield "import deepspeed", data["import_seconds"]["peer"], data["import_seconds"]["ours"]
    found = data["start_seconds"]
    for before, after in pairs(list(found)):
        of = [[each["initialize"] for each in found[name]] for name in (before, after)]
        yield f"initialize, {after}", of[0], of[1]


def checkpoints(arguments: argparse.Namespace) -> Iterator[Samples]:
    found = run(checkpoint, arguments)["checkpoints"]
    for before, after in pairs(list(found)):
        for part in ("save", "load"):
            yield f"{part}, {after}", found[before][part], found[after][part]


def decoding(arguments: argparse.Namespace) -> Iterator[Samples]:
    if not arguments.clients:
        return
    shape, tokens = ("tiny", 8) if arguments.quick else ("88M", 48)
    options = {"system": "generate", "shape": shape, "precision": "fp32", "longest": 256}
    after = Contender("ours", "inference_rank:Inference", options, python=arguments.clients[0], ranks=1)
    rows = [after, replace(after, name="peer", python=arguments.clients[1])]
    with started(rows) as jobs:
        for batch in (1, 16):
            prompts = [[number + 1] * 32 for number in range(batch)]
            work = partial(lambda job, asked: job.call("run", prompts=asked, tokens=tokens)[0], asked=prompts)
            found = round_robin(jobs, arguments.rounds, work)
            yield f"decode {tokens} tokens, batch {batch}", found["peer"], found["ours"]


MEASURED = {
    "train_step": train_steps,
    "engine_cost": engine_costs,
    "start": starts,
    "checkpoint": checkpoints,
    "decode": decoding,
}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    arguments.before = os.path.abspath(arguments.before)
    arguments.clients = [os.path.abspath(each) for each in arguments.clients or ()]
    arguments.rounds = 2 if arguments.quick else arguments.rounds
    report = Report("before_after", arguments)
    rows = [each for name in arguments.only for each in MEASURED[name](arguments)]
    cells = [
        [
            name,
            *(f"{Spread.of(each).median * 1e3:.3f}" for each in (before, after)),
            ratios(after, before).show(),
        ]
        for name, before, after in rows
    ]
    title = f"before and after, {arguments.rounds} rounds in alternation, milliseconds"
    report.table(title, ["", "before", "after", "after/before, median [min .. max]"], cells)
    report.data["seconds"] = {name: {"before": before, "after": after} for name, before, after in rows}
    report.save()


if __name__ == "__main__":
    main()
