"""Step time of a GPT on gloo ranks: compute alone, DDP, FSDP2, ours and the peer, side by side.

Micro-batch 1 x 256 tokens, AdamW, clipping at 1.0, one thread per rank. Every contender is a persistent
job; the driver goes round them and takes the ratio to DDP within each round. Baseline: DDP + torch's fused
AdamW, under autocast for bf16.

    python benchmarks/train_step.py --peer ../peer/bin/python --save cpu2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from tempfile import gettempdir
from typing import Any

from jobs import OURS, Contender, Job, Spread, described, measure, pack, ratios
from report import Report, common_arguments

PARAMETERS = {"tiny": 0.4e6, "10M": 10.5e6, "50M": 47.1e6}
GOALS = {  # step time / DDP
    "fp32": {0: 1.05, 1: 1.15, 2: 1.15, 3: 1.40},
    "bf16": {0: 1.00, 1: 1.05, 2: 1.05, 3: 1.25},
}
OFFLOAD_GOALS = {  # step time / DDP, both precisions
    "2+cpu": 1.15,
    "3+cpu": 1.40,
    "3+nvme": 1.70,
    "2+zenflow": None,
    "2+superoffload": None,
}
ON_HOST: dict[str, Any] = {"overlap_comm": True, "offload_optimizer": {"device": "cpu"}}
WHILE_TRAINING: dict[str, dict[str, Any]] = {  # sections of updates that do not wait for each other
    "zenflow": {
        **ON_HOST,
        "zenflow": {
            "topk_ratio": 0.1,
            "update_interval": 4,
            "select_strategy": "step",
            "select_interval": 32,
            "full_warm_up_rounds": 0,
        },
    },
    "superoffload": {**ON_HOST, "offload_optimizer": {"device": "cpu", "super_offload": True}},
}
ONLY_CUDA = {"2+superoffload"}  # of the peer
STEPS = {"tiny": 20, "10M": 6, "50M": 3}  # per measurement


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Step time relative to DDP.")
    parser.add_argument("--sizes", nargs="+", default=["10M", "50M"], choices=list(PARAMETERS))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=list(GOALS))
    parser.add_argument("--stages", nargs="*", type=int, default=[0, 1, 2], choices=range(4))
    parser.add_argument("--rounds", type=int, default=9, help="rounds over all contenders")
    parser.add_argument("--steps", type=int, default=0, help="steps per measurement; 0: by size")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--over-gloo", action="store_true", help="also rows of ours without shared memory")
    parser.add_argument(
        "--offload",
        nargs="*",
        default=[],
        choices=list(OFFLOAD_GOALS),
        help="rows with offload, such as 3+nvme",
    )
    parser.add_argument(
        "--folder", default=None, help="where NVMe offload swaps to; default: temporary files"
    )
    parser.add_argument("--without", nargs="*", default=[], help="rows to leave out (fsdp2, compute)")
    parser.add_argument("--memory-gib", type=float, default=20.0, help="contenders held in memory at once")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.sizes, arguments.precisions, arguments.stages = ["tiny"], ["fp32"], [2]
        arguments.rounds, arguments.without = 2, ["fsdp2"]
    return arguments


def contenders(arguments: argparse.Namespace, size: str, precision: str) -> list[Contender]:
    """All rows, DDP first."""

    def row(
        name: str, system: str, *, python: str = OURS, goal: float | None = None, **options: Any
    ) -> Contender:
        shards = arguments.ranks if options.get("stage") else 1
        per_parameter = 12 + 8 / shards  # weights, gradients and their buckets; moments
        return Contender(
            name,
            "trainers:Trainer",
            {"system": system, "model": size, "precision": precision, **options},
            python=python,
            ranks=arguments.ranks,
            goal=goal,
            memory_gib=arguments.ranks * (0.4 + PARAMETERS[size] * per_parameter / 2**30),
        )

    rows = [row("DDP", "ddp"), row("compute alone", "compute"), row("FSDP2", "fsdp2")]
    rows = [r for r in rows if r.options["system"] not in arguments.without]
    for stage in arguments.stages:
        rows.append(row(f"ours, stage {stage}", "engine", stage=stage, goal=GOALS[precision][stage]))
        if arguments.over_gloo:
            rows.append(row(f"ours, stage {stage}, over gloo", "engine", stage=stage, shared_memory=False))
        if arguments.peer:
            rows.append(row(f"peer, stage {stage}", "engine", stage=stage, python=arguments.peer))
    for kind in arguments.offload:
        stage, config = (
            int(kind[0]),
            {"zero_optimization": offloading(kind, arguments.folder or gettempdir())},
        )
        goal = OFFLOAD_GOALS[kind]
        rows.append(row(f"ours, stage {kind}", "engine", stage=stage, config=config, goal=goal))
        if arguments.peer and kind not in ONLY_CUDA:
            rows.append(
                row(f"peer, stage {kind}", "engine", stage=stage, config=config, python=arguments.peer)
            )
    return rows


def offloading(kind: str, folder: str) -> dict[str, Any]:
    """The zero_optimization section of a row: "2+cpu", "3+cpu" (also the parameters), "3+nvme" (all on storage) and
    those of WHILE_TRAINING."""
    stage, device = int(kind[0]), kind[2:]
    if device in WHILE_TRAINING:
        return {"stage": stage, **WHILE_TRAINING[device]}
    where = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
    section: dict[str, Any] = {"stage": stage, "offload_optimizer": {**where, "buffer_count": 5}}
    if stage == 3:
        section["offload_param"] = where
        section["sub_group_size"] = 1_000_000_000
    return section


def with_peak(job: Job) -> dict[str, Any]:
    return {"peak_bytes": max(job.call("peak_memory")), **described(job)}


def compare(arguments: argparse.Namespace, size: str, precision: str, report: Report) -> None:
    ddp, *others = contenders(arguments, size, precision)
    steps = arguments.steps or STEPS[size]
    data: dict[str, dict[str, Any]] = {}
    for run in pack(others, [ddp], arguments.memory_gib):
        found = measure(run, arguments.rounds, steps, with_peak)
        baseline = found[ddp.name]["seconds"]
        found = {name: {**each, "ddp_seconds": baseline} for name, each in found.items()}
        data = {**found, **data}  # DDP as in the first run
    report.table(
        f"{size} GPT, {precision}, {arguments.ranks} ranks, {arguments.rounds} rounds of {steps} steps",
        ["", "ms/step", "CPU ms", "ratio to DDP, median [min .. max]", "goal", "peak GiB/rank", "loss"],
        [cells(contender, data[contender.name]) for contender in [ddp, *others]],
    )
    report.data[f"{size}_{precision}"] = data


def cells(contender: Contender, found: dict[str, Any]) -> list[str]:
    return [
        contender.name,
        f"{Spread.of(found['seconds']).median * 1e3:.1f}",
        f"{Spread.of(found['cpu_seconds']).median * 1e3:.1f}",
        ratios(found["seconds"], found["ddp_seconds"]).show(),
        "" if contender.goal is None else f"<= {contender.goal:.2f}",
        f"{found['peak_bytes'] / 2**30:.2f}",
        f"{found['losses'][-1]:.4f}",
    ]


def main(argv: Sequence[str] | None = None) -> Report:
    arguments = parse(argv)
    report = Report("train_step", arguments)
    for size in arguments.sizes:
        for precision in arguments.precisions:
            compare(arguments, size, precision, report)
    report.save()
    return report


if __name__ == "__main__":
    main()
