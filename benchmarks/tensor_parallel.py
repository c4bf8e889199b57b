"""Step time where two ranks share each layer (TP) or each sequence (SP), against data parallelism with the same tokens.

All contenders train the same Llama of Transformers on the same sequences: with DP each rank has half of them, with TP
both ranks have all of them and half of each layer, with SP half of each sequence. Run it with an interpreter that has
transformers; the peer's needs the same release.

    ../clients/bin/python benchmarks/tensor_parallel.py --peer ../clients_peer/bin/python --save cpu2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from jobs import OURS, Contender, Spread, measure, ratios
from report import Report, common_arguments

GOAL = 1.15  # x DP
STEPS = {"tiny": 20, "small": 6}  # per measurement


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Step time of tensor and sequence parallelism against data parallelism.")
    parser.add_argument("--sizes", nargs="+", default=["small"], choices=list(STEPS))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1], choices=range(4))
    parser.add_argument("--kinds", nargs="+", default=["dp", "tp", "sp"], choices=["dp", "tp", "sp"])
    parser.add_argument("--rounds", type=int, default=9, help="rounds over all contenders")
    parser.add_argument("--steps", type=int, default=0, help="steps per measurement; 0: by size")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args(argv)
    if "dp" not in arguments.kinds:
        arguments.kinds = ["dp", *arguments.kinds]
    if arguments.quick:
        arguments.sizes, arguments.precisions, arguments.stages = ["tiny"], ["fp32"], [0]
        arguments.rounds, arguments.steps = 2, 3
    return arguments


def contenders(arguments: argparse.Namespace, size: str, precision: str, stage: int) -> list[Contender]:
    rows = []
    for kind in arguments.kinds:
        for name, python in (("ours", OURS), ("peer", arguments.peer)):
            if python:
                options: dict[str, Any] = {"how": kind, "size": size, "precision": precision, "stage": stage}
                options |= {"batch": arguments.batch, "context": arguments.context}
                rows.append(
                    Contender(
                        f"{name}, {kind.upper()} {arguments.ranks}",
                        "parallel_llama:ParallelRank",
                        options,
                        python=python,
                        ranks=arguments.ranks,
                        goal=GOAL if name == "ours" and kind != "dp" else None,
                    )
                )
    return rows


def cells(row: Contender, data: dict[str, dict[str, Any]], baseline: str) -> list[str]:
    found = data[row.name]
    peer = data.get(row.name.replace("ours", "peer"), found)
    return [
        row.name,
        f"{Spread.of(found['seconds']).median * 1e3:.1f}",
        f"{Spread.of(found['cpu_seconds']).median * 1e3:.1f}",
        ratios(found["seconds"], data[baseline]["seconds"]).show(),
        f"<= {row.goal:.2f}" if row.goal is not None else "",
        ratios(found["seconds"], peer["seconds"]).show() if peer is not found else "",
        f"{found['held'] / 1e6:.2f}",
        f"{found['losses'][-1]:.4f}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("tensor_parallel", arguments)
    for size in arguments.sizes:
        for precision in arguments.precisions:
            for stage in arguments.stages:
                rows = contenders(arguments, size, precision, stage)
                steps = arguments.steps or STEPS[size]
                data = measure(rows, arguments.rounds, steps)
                report.table(
                    f"{size} Llama, {precision}, stage {stage}, {arguments.batch * arguments.ranks} x "
                    f"{arguments.context} tokens, {arguments.rounds} rounds of {steps} steps",
                    [
                        "",
                        "ms/step",
                        "CPU ms",
                        "to our DP, median [min .. max]",
                        "goal",
                        "ours / peer",
                        "M held",
                        "loss",
                    ],
                    [cells(row, data, rows[0].name) for row in rows],
                )
                report.data[f"{size}_{precision}_{stage}"] = data
    report.save()


if __name__ == "__main__":
    main()
