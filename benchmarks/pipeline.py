"""Throughput of a pipeline of two stages against one rank that trains the same model on the same micro-batches.

    python benchmarks/pipeline.py --peer ../peer/bin/python --save cpu2

With m micro-batches and p stages 1F1B can be p * m / (m + p - 1) times as fast as one rank: 1.78 for 2 and 8. The row
"limit" is p ranks that each train the whole model at once without a word to each other: what this machine has left
for p processes, before any schedule.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from jobs import OURS, Contender, Spread, measure, ratios
from report import Report, common_arguments

GOALS = {"1f1b": 1.70, "zero-bubble": 1.85}  # x one rank
LIMIT = "limit, ranks apart"
SCHEDULES = ["1f1b", "zero-bubble", "interleaved", "zero-bubble-v", "auto"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Throughput of pipelines against one rank.")
    parser.add_argument("--size", default="10M", help="of the GPT")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES[:2], choices=SCHEDULES)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1, help="sequences per micro-batch")
    parser.add_argument("--context", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps per measurement")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.size, arguments.precisions, arguments.rounds, arguments.steps = "tiny", ["fp32"], 2, 2
        arguments.context = 64
    return arguments


def contenders(arguments: argparse.Namespace, precision: str) -> list[Contender]:
    common: dict[str, Any] = {
        "size": arguments.size,
        "precision": precision,
        "micro_batches": arguments.micro_batches,
        "batch": arguments.batch,
        "context": arguments.context,
    }
    target, stages = "pipeline_gpt:PipelineRank", arguments.stages
    rows = [Contender("one rank, plain", target, {"schedule": "plain", **common}, ranks=1)]
    rows.append(Contender(LIMIT, target, {"schedule": "plain", **common}, ranks=stages))
    for schedule in arguments.schedules:
        options = {"schedule": schedule, **common}
        rows.append(
            Contender(
                f"ours, {schedule}", target, options, ranks=stages, goal=GOALS.get(schedule), python=OURS
            )
        )
    if "zero-bubble" in arguments.schedules:
        held = 2 * stages - 1
        options = {"schedule": "zero-bubble", "held": held, **common}
        rows.append(
            Contender(
                f"ours, zero-bubble, {held} held", target, options, ranks=stages, goal=GOALS["zero-bubble"]
            )
        )
    if arguments.peer:
        rows.append(
            Contender("peer", target, {"schedule": "1f1b", **common}, python=arguments.peer, ranks=stages)
        )
    return rows


def cells(row: Contender, data: dict[str, dict[str, Any]], alone: list[float]) -> list[str]:
    found = data[row.name]
    models = row.ranks if row.name == LIMIT else 1  # that are trained at once
    return [
        row.name,
        f"{Spread.of(found['seconds']).median * 1e3:.1f}",
        f"{Spread.of(found['cpu_seconds']).median * 1e3:.1f}",
        ratios([seconds * models for seconds in alone], found["seconds"]).show(),
        f">= {row.goal:.2f}" if row.goal is not None else "",
        f"{found['losses'][-1]:.5f}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("pipeline", arguments)
    for precision in arguments.precisions:
        rows = contenders(arguments, precision)
        data = measure(rows, arguments.rounds, arguments.steps, lambda job: job.call("describe")[-1])
        report.table(
            f"{arguments.size} GPT, {precision}, {arguments.stages} stages, {arguments.micro_batches} micro-batches of "
            f"{arguments.batch} x {arguments.context} tokens, {arguments.rounds} rounds of {arguments.steps} steps",
            ["", "ms/step", "CPU ms", "x one rank, median [min .. max]", "goal", "loss"],
            [cells(row, data, data[rows[0].name]["seconds"]) for row in rows],
        )
        report.data[precision] = data
    report.save()


if __name__ == "__main__":
    main()
