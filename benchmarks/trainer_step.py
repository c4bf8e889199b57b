"""Step time of Transformers' Trainer on a tiny Llama, two gloo ranks: ours and the peer side by side.

The whole step of the Trainer is timed, its data loader and callbacks included: what a user of Trainer waits for. The
driver goes round all jobs and takes ours / peer within each round. Run it with an interpreter that has transformers and
accelerate; the peer's needs the same releases of both.

    ../clients/bin/python benchmarks/trainer_step.py --peer ../clients_peer/bin/python --save cpu2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from jobs import OURS, Contender, Spread, measure, ratios
from report import Report, common_arguments

GOAL = 0.80  # ours / peer
STEPS = {"tiny": 20, "small": 6}  # per measurement


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Step time of Transformers' Trainer, ours / peer.")
    parser.add_argument("--sizes", nargs="+", default=["tiny"], choices=list(STEPS))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3], choices=range(4))
    parser.add_argument("--rounds", type=int, default=9, help="rounds over all contenders")
    parser.add_argument("--steps", type=int, default=0, help="steps per measurement; 0: by size")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.precisions, arguments.stages, arguments.rounds, arguments.steps = ["fp32"], [2], 2, 5
    return arguments


def contenders(arguments: argparse.Namespace, size: str, precision: str) -> list[Contender]:
    """For each stage ours, then the peer."""
    rows = []
    for stage in arguments.stages:
        for name, python in (("ours", OURS), ("peer", arguments.peer)):
            if python:
                options: dict[str, Any] = {"stage": stage, "size": size, "precision": precision}
                options |= {"batch": arguments.batch, "context": arguments.context}
                rows.append(
                    Contender(
                        f"{name}, stage {stage}",
                        "hf_trainer:TrainerRank",
                        options,
                        python=python,
                        ranks=arguments.ranks,
                        goal=GOAL if name == "ours" and arguments.peer else None,
                    )
                )
    return rows


def cells(row: Contender, data: dict[str, dict[str, Any]]) -> list[str]:
    found = data[row.name]
    peer = data.get(row.name.replace("ours", "peer"))
    against = row.goal is not None and peer is not None
    return [
        row.name,
        f"{Spread.of(found['seconds']).median * 1e3:.1f}",
        f"{Spread.of(found['cpu_seconds']).median * 1e3:.1f}",
        ratios(found["seconds"], peer["seconds"]).show() if against and peer else "",
        ratios(found["cpu_seconds"], peer["cpu_seconds"]).show() if against and peer else "",
        f"<= {row.goal:.2f}" if row.goal is not None else "",
        f"{found['losses'][-1]:.4f}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("trainer_step", arguments)
    for size in arguments.sizes:
        for precision in arguments.precisions:
            rows = contenders(arguments, size, precision)
            steps = arguments.steps or STEPS[size]
            data = measure(rows, arguments.rounds, steps)
            parameters = data[rows[0].name]["parameters"]
            report.table(
                f"{size} Llama ({parameters / 1e6:.1f}M), {precision}, {arguments.batch} x {arguments.context} tokens, "
                f"{arguments.ranks} ranks, {arguments.rounds} rounds of {steps} steps",
                [
                    "",
                    "ms/step",
                    "CPU ms",
                    "ours / peer, median [min .. max]",
                    "CPU, ours / peer",
                    "goal",
                    "loss",
                ],
                [cells(row, data) for row in rows],
            )
            report.data[f"{size}_{precision}"] = data
    report.save()


if __name__ == "__main__":
    main()
