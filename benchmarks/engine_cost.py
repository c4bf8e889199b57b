"""What an engine adds to a step: a 64-64-64 MLP on one rank and one thread, in microseconds.

The plain loop is forward, backward, `clip_grad_norm_` at 1.0, torch's fused AdamW and `zero_grad`; the
engines do the same through `engine(x)`, `engine.backward(loss)`, `engine.step()`. Each contender runs in a
process of its own, in alternating blocks of steps; the cost is the difference to the plain loop in the same
round.

    python benchmarks/engine_cost.py --peer ../peer/bin/python --save cpu1
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jobs import OURS, Contender, Spread, differences, round_robin, started
from report import Report, common_arguments

GOALS_US = {0: 20, 1: 20, 2: 25, 3: 60}
PLAIN = "plain loop"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Microseconds that an engine adds to a step.")
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2], choices=range(4))
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400, help="steps per block")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.stages, arguments.rounds, arguments.steps = [2], 3, 100
    return arguments


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    def row(
        name: str, system: str, stage: int = 0, python: str = OURS, goal: float | None = None
    ) -> Contender:
        options = {
            "system": system,
            "model": "mlp",
            "precision": arguments.precision,
            "stage": stage,
            "batch": arguments.batch,
            "warmup": 50,
        }
        return Contender(name, "trainers:Trainer", options, python=python, ranks=1, goal=goal)

    rows = [row(PLAIN, "compute")]
    rows += [row(f"ours, stage {s}", "engine", s, goal=GOALS_US[s]) for s in arguments.stages]
    if arguments.peer:
        rows += [row(f"peer, stage {s}", "engine", s, python=arguments.peer) for s in arguments.stages]
    return rows


def main(argv: Sequence[str] | None = None) -> Report:
    arguments = parse(argv)
    report = Report("engine_cost", arguments)
    rows = contenders(arguments)
    with started(rows) as jobs:
        seconds = round_robin(jobs, arguments.rounds, lambda job: job.call("run", steps=arguments.steps)[0])
    micros = {name: [s * 1e6 for s in samples] for name, samples in seconds.items()}
    cells = [
        [
            row.name,
            f"{Spread.of(micros[row.name]).median:.0f}",
            differences(micros[row.name], micros[PLAIN]).show("{:.0f}"),
            "" if row.goal is None else f"<= {row.goal:.0f}",
        ]
        for row in rows
    ]
    report.table(
        f"MLP 64-64-64, {arguments.precision}, batch {arguments.batch}, one rank, one thread, "
        f"{arguments.rounds} rounds of {arguments.steps} steps",
        ["", "us/step", "over the plain loop, median [min .. max]", "goal"],
        cells,
    )
    report.data["microseconds_per_step"] = micros
    report.save()
    return report


if __name__ == "__main__":
    main()
