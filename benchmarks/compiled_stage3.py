"""Step time of compiled stage 3 against compiled DDP: a GPT on two ranks, inductor on both sides.

Micro-batch 1 x 256 tokens, AdamW, clipping at 1.0, one thread per rank, alternating in one run. DDP is one
``torch.compile`` around ``DistributedDataParallel`` with torch's fused AdamW. Stage 3 is ``engine.compile()``, once
with the default schedule of ``compile.deepcompile`` (gathers around blocks, then what fits stays gathered) and once
gathering and releasing every block in every step; eager stage 3 and eager DDP stand beside. Graphs are counted after
the second step and at the end: all blocks share one, and none may be added.

The first run compiles for a minute or two; later ones take the kernels from inductor's cache.

    python benchmarks/compiled_stage3.py --save cpu
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from jobs import OURS, Contender, Spread, measure, ratios
from report import Report, common_arguments
from train_step import PARAMETERS, STEPS

GOAL = 1.05
WARMUP = 7  # the default schedule keeps parameters gathered from step 5 on
ALWAYS = {"stage3_param_persistence_threshold": 0}
BASELINE = "DDP, compiled"


def contenders(arguments: argparse.Namespace, size: str, precision: str) -> list[Contender]:
    def row(
        name: str, system: str, *, python: str = OURS, goal: float | None = None, **options: Any
    ) -> Contender:
        given = {"system": system, "model": size, "precision": precision, "warmup": WARMUP, **options}
        return Contender(name, "trainers:Trainer", given, python=python, ranks=arguments.ranks, goal=goal)

    def zero(*, passes: bool, **more: Any) -> dict[str, Any]:
        sections: dict[str, Any] = {"zero_optimization": {"stage": 3, **more}}
        return {**sections, "compile": {"deepcompile": True}} if passes else sections

    engine: dict[str, Any] = {"system": "engine", "stage": 3}
    rows = [
        row(BASELINE, "compiled ddp"),
        row("DDP", "ddp"),
        row("ours, stage 3", **engine, config=zero(passes=False)),
        row("ours, stage 3, compiled", **engine, config=zero(passes=True), compiled=True, goal=GOAL),
        row(
            "ours, compiled, always gathering",
            **engine,
            config=zero(passes=False, **ALWAYS),
            compiled=True,
            goal=GOAL,
        ),
    ]
    if arguments.peer:
        rows.append(
            row(
                "peer, stage 3, compiled",
                **engine,
                config=zero(passes=False),
                compiled=True,
                python=arguments.peer,
            )
        )
    return [row for row in rows if row.name not in arguments.without]


def compare(arguments: argparse.Namespace, size: str, precision: str, report: Report) -> None:
    rows = contenders(arguments, size, precision)
    found = measure(rows, arguments.rounds, arguments.steps or STEPS[size])
    baseline = found[BASELINE]["seconds"]
    report.table(
        f"{size} GPT, {precision}, {arguments.ranks} ranks, {arguments.rounds} rounds of "
        f"{arguments.steps or STEPS[size]} steps",
        ["", "ms/step", "CPU ms", f"ratio to {BASELINE}", "goal", "graphs", "after step 2", "loss"],
        [cells(row, found[row.name], baseline) for row in rows],
    )
    report.data[f"{size}_{precision}"] = found


def cells(row: Contender, found: dict[str, Any], baseline: Sequence[float]) -> list[str]:
    graphs = found["graphs"]
    return [
        row.name,
        f"{Spread.of(found['seconds']).median * 1e3:.1f}",
        f"{Spread.of(found['cpu_seconds']).median * 1e3:.1f}",
        ratios(found["seconds"], baseline).show(),
        "" if row.goal is None else f"<= {row.goal:.2f}",
        str(graphs[1] or ""),
        f"+{graphs[-1] - graphs[1]}" if graphs[1] else "",
        f"{found['losses'][-1]:.4f}",
    ]


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--sizes", nargs="+", default=["10M", "50M"], choices=list(PARAMETERS))
    parser.add_argument("--precisions", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=9, help="rounds over all contenders")
    parser.add_argument("--steps", type=int, default=0, help="steps per measurement; 0: by size")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--without", nargs="*", default=[], help="rows to leave out, by name")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sizes, arguments.rounds = ["tiny"], 2
        arguments.without = ["DDP", "ours, stage 3"]
    report = Report("compiled_stage3", arguments)
    for size in arguments.sizes:
        for precision in arguments.precisions:
            compare(arguments, size, precision, report)
    report.save()


if __name__ == "__main__":
    main()
