"""Step times that `ds plan` predicts from a calibration on two ranks, against steps that were measured.

One rank on each of 1 to 4 hosts that are network namespaces of this machine (links.py), whose links are limited. The
calibration knows neither the links nor more than two ranks. Hosts share the processors of the machine: the prediction
is told of how many ranks. A cell is a rate, a number of ranks and a ZeRO stage. Cells are measured in turn, round after
round, and so are the stages of the calibration: what a machine can do that others share changes within minutes.

    python benchmarks/predicted_steps.py --save links
    python benchmarks/predicted_steps.py --calibration file.json --ranks 4 --mbits 20
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.planning.activations import shape_of
from deepspeed.planning.ledger import STEADY, MemoryPlace
from deepspeed.planning.request import PlanRequest, answer
from deepspeed.planning.step_time.calibration import Calibration, fabric_of, load, work_of
from deepspeed.planning.step_time.hardware import NetworkSpec
from deepspeed.planning.step_time.shapes import build_shape
from deepspeed.planning.step_time.step import StepMachine, step_time
from deepspeed.planning.step_time.work import flops_by_call
from deepspeed.tools.calibrate import CalibrationRequest, calibrate
from jobs import Job, progress
from links import Links, links_or_exit
from predicted_rank import at_stage
from report import RESULTS, Report, common_arguments

STAGES = (0, 1, 2, 3)
BURST = 256 * 1024  # of links.py
SHARE = 1448 / 1514  # payload of a frame, as tc counts it
CLOSE, CLOSE_MEMORY = 0.1, 0.03
MEASURED_TIMES = 2
"""Each memory, of which the least counts: torch's profiler does not see what threads of gloo give back, and then takes
a tensor that a collective has sent to be there still."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Predicted against measured step times over slow links.")
    parser.add_argument(
        "--mbits", nargs="+", type=float, default=[20, 100, 300, 1000], help="rates of the links"
    )
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[1, 2, 3, 4], help="numbers of hosts, a rank on each"
    )
    parser.add_argument("--stages", nargs="+", type=int, default=list(STAGES))
    parser.add_argument("--model", default="gpt:4x192x6x2048", help="a shape, as `ds plan --model` takes it")
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=60, help="most steps of a cell; the median counts")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of a cell, and a step of each round at least"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--join", nargs="+", metavar="WHAT", help="no measurement: one table of saved parts (--save)"
    )
    parser.add_argument("--calibration", help="a file to use; default: calibrate now")
    parser.add_argument("--memory", action="store_true", help="memory instead of time")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.mbits, arguments.ranks, arguments.stages, arguments.rounds = [100], [1, 2], [0, 3], 2
    return arguments


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": arguments.micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": arguments.precision == "bf16"},
        "zero_optimization": {"reduce_bucket_size": 500_000},  # several: some sums pass beside backward
        "steps_per_print": 10**9,
    }


class Predictor:
    def __init__(self, arguments: argparse.Namespace, found: Calibration) -> None:
        self.found = found
        self.config = config_of(arguments)
        with torch.device("meta"):
            self.module = build_shape(arguments.model)
        self.tokens, self.sequence = arguments.micro * arguments.sequence, arguments.sequence

    def seconds(self, mbits: float, ranks: int, stage: int) -> float:
        config = at_stage(self.config, stage)
        planned = answer(PlanRequest(module=self.module, config=config, ranks=ranks, device_type="cpu"))
        shape = shape_of(self.module.config)
        flops = flops_by_call(self.module, planned.setting.model, self.tokens, self.sequence, shape)
        link = NetworkSpec(
            name=f"{mbits:g} Mbit/s", rate=mbits * 1e6 / 8, share=SHARE, burst=BURST, peak=1e12
        )
        machine = StepMachine(fabric=fabric_of(self.found, link, 1))
        return step_time(planned.setting, work_of(self.found, planned.setting, flops, ranks), machine).seconds


def job(arguments: argparse.Namespace, links: Links, ranks: int) -> Job:
    options = {
        "model": arguments.model,
        "micro": arguments.micro,
        "sequence": arguments.sequence,
        "config": config_of(arguments),
    }
    return Job(
        f"{ranks} ranks",
        "predicted_rank:PredictedRank",
        options,
        ranks=ranks,
        place=lambda rank: links.place(rank, 1),
    )


def measure(arguments: argparse.Namespace, predictor: Predictor, ranks: int) -> list[dict[str, Any]]:
    """All cells of so many ranks in turn, round after round: a slow moment of the machine hits a part of each."""
    rates = arguments.mbits if ranks > 1 else arguments.mbits[-1:]
    taken: dict[tuple[float, int], list[float]] = {}
    with links_or_exit(ranks) as links, job(arguments, links, ranks) as running:
        links.limit(10_000)
        progress(f"{ranks} ranks")
        running.call("prepare", stages=arguments.stages, warmup=5)
        cells = {
            (mbits, stage): predictor.seconds(mbits, ranks, stage)
            for mbits in rates
            for stage in arguments.stages
        }
        for number in range(arguments.rounds):
            progress(f"{ranks} ranks, round {number + 1}")
            for mbits in rates:
                links.limit(mbits)
                # Spends what was saved up for a burst.
                running.call("run", stage=arguments.stages[0], steps=1)
                for stage in arguments.stages:
                    most = min(arguments.steps, arguments.seconds / cells[mbits, stage])
                    rows = running.call("run", stage=stage, steps=max(1, round(most / arguments.rounds)))
                    taken.setdefault((mbits, stage), []).extend(max(step) for step in zip(*rows, strict=True))
    return [
        {
            "mbits": mbits,
            "ranks": ranks,
            "stage": stage,
            "measured": statistics.median(taken[mbits, stage]),
            "predicted": foreseen,
            "steps": len(taken[mbits, stage]),
        }
        for (mbits, stage), foreseen in sorted(cells.items(), key=lambda cell: (cell[0][1], cell[0][0]))
    ]


def off(cell: dict[str, Any]) -> float:
    return cell["predicted"] / cell["measured"] - 1


def times(arguments: argparse.Namespace, report: Report) -> None:
    if arguments.calibration and Path(arguments.calibration).exists():
        found = load(arguments.calibration)
    else:
        asked = CalibrationRequest(
            model=arguments.model,
            config=config_of(arguments),
            micro=arguments.micro,
            sequence=arguments.sequence,
            steps=15,
            threads=1,
        )
        with links_or_exit(2) as links:
            found = calibrate(asked, lambda rank: links.place(rank, 1), tell=progress)
        if arguments.calibration:
            found.save(arguments.calibration)
    for line in found.lines_of_text():
        report.line(line)
    predictor = Predictor(arguments, found)
    cells = [cell for ranks in arguments.ranks for cell in measure(arguments, predictor, ranks)]
    show(cells, report)


def show(cells: Sequence[dict[str, Any]], report: Report) -> None:
    rows = [
        [
            f"{cell['ranks']} x stage {cell['stage']}",
            f"{cell['mbits']:g}" if cell["ranks"] > 1 else "-",
            f"{cell['measured'] * 1e3:.1f}",
            f"{cell['predicted'] * 1e3:.1f}",
            f"{off(cell):+.1%}",
            "" if abs(off(cell)) <= CLOSE else "*",
        ]
        for cell in cells
    ]
    report.table("a step", ["ranks", "Mbit/s", "measured ms", "predicted ms", "off by", ""], rows)
    close = sum(abs(off(cell)) <= CLOSE for cell in cells)
    report.line()
    report.line(
        f"within {CLOSE:.0%}: {close} of {len(cells)} cells ({close / len(cells):.0%}); goal: 90 %. "
        f"Median of |off|: {statistics.median(abs(off(cell)) for cell in cells):.1%}"
    )
    report.data["cells"] = list(cells)


def join(arguments: argparse.Namespace, report: Report) -> None:
    """Parts that were measured one after another, each with a calibration of its own minutes."""
    cells: list[dict[str, Any]] = []
    for what in arguments.join:
        path = RESULTS / f"predicted_steps_{what}"
        data = json.loads(Path(f"{path}.json").read_text())
        cells += data["cells"]
        report.line()
        text = Path(f"{path}.txt").read_text().splitlines()
        report.line(f"{what}: {text[0]}")
        for line in text[2 : text.index("a step") - 1]:
            report.line(f"  {line}")
    show(sorted(cells, key=lambda cell: (cell["ranks"], cell["stage"], cell["mbits"])), report)


def memory(arguments: argparse.Namespace, report: Report) -> None:
    """Against torch's allocator, with so few tokens that what is only estimated (activations) is small."""
    sequence = 8
    with torch.device("meta"):
        module = build_shape(arguments.model)
    cells = []
    for ranks in arguments.ranks:
        with links_or_exit(ranks) as links, job(arguments, links, ranks) as running:
            for stage in arguments.stages:
                config = at_stage(config_of(arguments), stage)
                config["train_micro_batch_size_per_gpu"] = 1
                planned = answer(
                    PlanRequest(
                        module=module,
                        config=config,
                        ranks=ranks,
                        nodes=ranks,
                        device_type="cpu",
                        shape=shape_of(module.config),
                        sequence=sequence,
                    )
                )
                seen = min(
                    running.call("memory", stage=stage, sequence=sequence)[0] for _ in range(MEASURED_TIMES)
                )
                foreseen = planned.ledger.peak(MemoryPlace.HOST, STEADY)[0]
                cells.append({"ranks": ranks, "stage": stage, "measured": seen, "predicted": foreseen})
    rows = [
        [
            f"{cell['ranks']} x stage {cell['stage']}",
            f"{cell['measured'] / 2**20:.2f}",
            f"{cell['predicted'] / 2**20:.2f}",
            f"{off(cell):+.1%}",
        ]
        for cell in cells
    ]
    report.table("memory of rank 0", ["ranks", "measured MiB", "predicted MiB", "off by"], rows)
    close = sum(abs(off(cell)) <= CLOSE_MEMORY for cell in cells)
    report.line()
    report.line(f"within {CLOSE_MEMORY:.0%}: {close} of {len(cells)}")
    report.data["cells"] = cells


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("predicted_steps", arguments)
    (join if arguments.join else memory if arguments.memory else times)(arguments, report)
    report.save()


if __name__ == "__main__":
    main()
