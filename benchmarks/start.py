"""How long until there is an engine: `import deepspeed` beyond `import torch`, and the call of `initialize`.

Each sample is a fresh process (imports) or a fresh job of two ranks (initialize). The call includes
everything that `deepspeed.initialize` causes: resolving the name, starting the process group, optimizer,
buffers. DDP's row is `init_process_group`, the DDP wrapper and the fused AdamW.

    python benchmarks/start.py --peer ../peer/bin/python --save cpu2
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from jobs import FOLDER, OURS, Contender, Spread, progress, rank_environment
from report import Report, common_arguments

IMPORT_GOAL_S, INITIALIZE_GOAL_S = 0.3, 0.5
IMPORT = "import time, torch; t = time.perf_counter(); import deepspeed; print(time.perf_counter() - t)"


class Starter:
    """One rank that times its own start; everything before `start()` is not in it but `import torch`."""

    def __init__(self, system: str, model: str, stage: int, precision: str) -> None:
        self.options = (system, model, stage, precision)

    def start(self) -> dict[str, float]:
        """Seconds of each part; "initialize" is the call alone."""
        begin = time.perf_counter()
        import torch

        import gpt
        from trainers import ddp_step, engine_config

        torch_imported = time.perf_counter()
        system, size, stage, precision = self.options
        module = gpt.build(size, 256)
        built = time.perf_counter()
        if system == "engine":
            import deepspeed

            imported = time.perf_counter()
            config = engine_config(stage, precision, 1)
            deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
        else:
            imported = built
            torch.distributed.init_process_group("gloo")
            ddp_step(module, precision, "cpu")
        end = time.perf_counter()
        return {
            "torch": torch_imported - begin,
            "model": built - torch_imported,
            "import": imported - built,
            "initialize": end - imported,
            "all": end - begin,
        }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Seconds to import and to initialize.")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--model", default="10M", choices=["tiny", "10M", "50M"])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2], choices=range(4))
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.samples, arguments.model, arguments.stages = 2, "tiny", [2]
    return arguments


def import_seconds(python: str) -> float:
    """Last line printed: the peer prints others while it is imported."""
    done = subprocess.run(
        [python, "-c", IMPORT],
        env=rank_environment(python, 0, 1, 1, 0),
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return float(done.stdout.strip().splitlines()[-1])


def measure_imports(arguments: argparse.Namespace, report: Report) -> None:
    pythons = {"ours": OURS} | ({"peer": arguments.peer} if arguments.peer else {})
    samples: dict[str, list[float]] = {name: [] for name in pythons}
    for number in range(arguments.samples + 1):
        progress(f"import {number} of {arguments.samples}")
        for name, python in pythons.items():
            seconds = import_seconds(python)
            if number:  # the first one writes byte code and fills the page cache
                samples[name].append(seconds)
    rows = [
        [name, Spread.of(values).show("{:.3f}"), f"<= {IMPORT_GOAL_S}" if name == "ours" else ""]
        for name, values in samples.items()
    ]
    report.table("import deepspeed after import torch, s", ["", "median [min .. max]", "goal"], rows)
    report.data["import_seconds"] = samples


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    def row(name: str, system: str, stage: int, python: str = OURS, goal: float | None = None) -> Contender:
        options: dict[str, Any] = {
            "system": system,
            "model": arguments.model,
            "stage": stage,
            "precision": arguments.precision,
        }
        return Contender(name, "start:Starter", options, python=python, ranks=arguments.ranks, goal=goal)

    rows = [row("DDP", "ddp", 0)]
    rows += [row(f"ours, stage {s}", "engine", s, goal=INITIALIZE_GOAL_S) for s in arguments.stages]
    if arguments.peer:
        rows += [row(f"peer, stage {s}", "engine", s, python=arguments.peer) for s in arguments.stages]
    return rows


def measure_starts(arguments: argparse.Namespace, report: Report) -> None:
    rows = contenders(arguments)
    samples: dict[str, list[dict[str, float]]] = {row.name: [] for row in rows}
    for number in range(arguments.samples + 1):
        progress(f"start {number} of {arguments.samples}")
        for row in rows:
            with row.start() as job:
                ranks = job.call("start")
            if number:  # the first one may compile kernels
                samples[row.name].append({part: max(rank[part] for rank in ranks) for part in ranks[0]})
    cells = [
        [
            row.name,
            Spread.of([s["initialize"] for s in samples[row.name]]).show(),
            "" if row.goal is None else f"<= {row.goal}",
            Spread.of([s["all"] for s in samples[row.name]]).show(),
        ]
        for row in rows
    ]
    report.table(
        f"start of a {arguments.model} GPT, {arguments.precision}, {arguments.ranks} ranks, s",
        ["", "initialize: median [min .. max]", "goal", "with import torch, deepspeed and the model"],
        cells,
    )
    report.data["start_seconds"] = samples


def main(argv: Sequence[str] | None = None) -> Report:
    arguments = parse(argv)
    report = Report("start", arguments)
    measure_imports(arguments, report)
    measure_starts(arguments, report)
    report.save()
    return report


if __name__ == "__main__":
    main()
