"""How long training waits for a save that goes on in the background, against one copy of what is saved.

The copy: as many bytes as each rank saves (the first has the weights, too), from memory to memory, on all ranks at
once. Like is compared with like: a save copies into memory that it has kept since the last round, and so does the copy;
the first save fetches its memory from the system, and is compared with a copy into memory that is new. A step is
trained before each. Also: what the record of collectives, of which reports about hangs are made, costs a step.

    python benchmarks/save_stall.py --peer ../peer/bin/python --save cpu2
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from jobs import OURS, Contender, Spread, progress, ratios, round_robin, started
from report import Report, common_arguments
from trainers import Trainer

GOAL = 1.2  # copies
RECORD_GOAL = 1.005
WAITING_ROUNDS = 3  # of saves that wait, which take long and are far from the goal
BACKGROUND = {"checkpoint": {"writer": {"type": "FAST", "decoupled": True}}}


class SavingRank(Trainer):
    """A trainer that can also copy memory, or whose collectives are not recorded."""

    def __init__(self, *args: Any, recorded: bool = True, **kwargs: Any) -> None:
        if not recorded:
            from deepspeed.comm.collectives import Communicator

            Communicator._history = property(lambda self: None, lambda self, value: None)  # type: ignore
        super().__init__(*args, **kwargs)

    def state_bytes(self) -> int:
        """Of the copy that the last save took."""
        return self.engine.background_writer.snapshot.copied

    def keep(self) -> float:
        """Memory for `copy`, fetched and filled: the seconds of that."""
        source = torch.ones(self.state_bytes(), dtype=torch.uint8)
        self.kept: list[torch.Tensor] = [source]
        return self._timed(lambda: self.kept.append(source.clone()))

    def copy(self) -> float:
        source, target = self.kept
        return self._timed(lambda: target.copy_(source))

    def finish(self) -> None:
        """Return when what was saved is on disk."""
        self.engine.background_writer.wait()
        self.settle()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--model", default="50M", choices=["tiny", "10M", "50M"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of a round, for the cost of the record")
    parser.add_argument("--only", choices=["stall", "record"], help="one of the two questions")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.model, arguments.rounds, arguments.steps = "tiny", 2, 2
    return arguments


def row(
    arguments: argparse.Namespace, name: str, config: dict[str, Any], python: str = OURS, **more: Any
) -> Contender:
    options = {"system": "engine", "model": arguments.model, "precision": arguments.precision}
    options |= {"stage": arguments.stage, "warmup": 2, "config": config} | more
    return Contender(name, "save_stall:SavingRank", options, python=python, ranks=arguments.ranks)


def stall(arguments: argparse.Namespace, report: Report) -> None:
    rows = [row(arguments, "in the background", BACKGROUND), row(arguments, "ours, waiting", {})]
    if arguments.peer:
        rows.append(row(arguments, "peer, waiting", {}, arguments.peer))
    seconds: dict[str, list[float]] = {each.name: [] for each in rows}
    copies: list[float] = []
    first, new, shares = 0.0, 0.0, []
    with tempfile.TemporaryDirectory() as name, started(rows) as jobs:
        folder = Path(name) / "checkpoint"
        for number in range(arguments.rounds + 1):
            for each, job in jobs.items():
                if number > WAITING_ROUNDS and each != rows[0].name:
                    continue
                progress(f"round {number}: {each}")
                job.call("run", steps=1)
                taken = max(job.call("save", folder=str(folder), tag=f"step{number}"))
                if number:
                    seconds[each].append(taken)
                if each == rows[0].name:
                    job.call("finish")
                    job.call("run", steps=1)
                    if number:
                        copies.append(max(job.call("copy")))
                    else:
                        first, new = taken, max(job.call("keep"))
                        shares = [f"{nbytes / 1e6:.0f}" for nbytes in job.call("state_bytes")]
                job.call("settle")
                shutil.rmtree(folder)
    report.data["stall"] = {
        "seconds": seconds,
        "copies": copies,
        "first": [first, new],
        "mb_of_ranks": shares,
    }
    report.table(
        f"save_checkpoint from call to return, {arguments.model} GPT, {arguments.precision}, stage {arguments.stage}, "
        f"{arguments.ranks} ranks, {' and '.join(shares)} MB, {arguments.rounds} rounds",
        ["", "ms", "copies of the state, median [min .. max]", "goal"],
        [
            ["one copy", f"{Spread.of(copies).median * 1e3:.0f}", "", ""],
            *(
                [
                    each,
                    f"{Spread.of(taken).median * 1e3:.0f}",
                    ratios(taken, copies[: len(taken)]).show(),
                    f"<= {GOAL}" if each == rows[0].name else "",
                ]
                for each, taken in seconds.items()
            ),
        ],
    )
    report.line(
        f"into memory that is new: the first save in the background {first * 1e3:.0f} ms, a copy {new * 1e3:.0f} ms"
    )


def record(arguments: argparse.Namespace, report: Report) -> None:
    off = {"comm": {"hang_report_seconds": 0}}
    rows = [row(arguments, "no record", off, recorded=False), row(arguments, "record", {})]
    with started(rows) as jobs:
        for job in jobs.values():
            job.call("run", steps=arguments.steps)
        seconds = round_robin(jobs, arguments.rounds, lambda job: max(job.call("run", steps=arguments.steps)))
    base = seconds[rows[0].name]
    report.data["record"] = seconds
    report.table(
        f"a step with and without the record and watch of collectives, {arguments.rounds} rounds of "
        f"{arguments.steps} steps",
        ["", "ms/step", "x without, median [min .. max]", "goal"],
        [
            [
                name,
                f"{Spread.of(taken).median * 1e3:.1f}",
                ratios(taken, base).show("{:.3f}"),
                f"<= {RECORD_GOAL}" if taken is not base else "",
            ]
            for name, taken in seconds.items()
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("save_stall", arguments)
    if arguments.only != "record":
        stall(arguments, report)
    if arguments.only != "stall":
        record(arguments, report)
    report.save()


if __name__ == "__main__":
    main()
