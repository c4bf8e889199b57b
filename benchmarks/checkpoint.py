"""Saving and loading a checkpoint: seconds, bytes on disk and bytes read by each rank, beside the peer.

Each contender trains a few steps, so that optimizer state exists, and then saves and loads in turn with the
others. Seconds are those of the slowest rank, from call to return; what was just written is still in the page
cache when it is loaded, for every contender. Ours goes on to have the disk store it in a thread, the peer leaves that
to the system; the column "copy and flush" is what one process takes to write and flush the same number of bytes.

    python benchmarks/checkpoint.py --peer ../peer/bin/python --save cpu2
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobs import OURS, Contender, Job, Spread, progress, started
from report import Report, common_arguments

TAG = "step"


@dataclass
class Samples:
    save: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    on_disk: int = 0
    read: list[int] = field(default_factory=list)  # bytes read by each rank in one load


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Seconds and bytes of a checkpoint.")
    parser.add_argument("--model", default="50M", choices=["tiny", "10M", "50M"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2], choices=range(4))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", help="where to write; default: the system's folder for temporary files")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.model, arguments.stages, arguments.rounds = "tiny", [2], 2
    return arguments


def contenders(arguments: argparse.Namespace, stage: int) -> list[Contender]:
    def row(name: str, python: str) -> Contender:
        options = {
            "system": "engine",
            "model": arguments.model,
            "precision": arguments.precision,
            "stage": stage,
            "warmup": 2,
        }
        return Contender(name, "trainers:Trainer", options, python=python, ranks=arguments.ranks)

    rows = [row(f"ours, stage {stage}", OURS)]
    return rows + ([row(f"peer, stage {stage}", arguments.peer)] if arguments.peer else [])


def measure(job: Job, folder: Path, samples: Samples) -> None:
    """One save and one load in a fresh folder, removed afterwards.

    Just before, the same save is made and removed: its memory is there again at once. Memory that has been free for
    seconds may have been given back to the host of a virtual machine, and fetching it takes longer than all of this.
    """
    try:
        job.call("save", folder=str(folder), tag=TAG)
        shutil.rmtree(folder)
        job.call("settle")
        samples.save.append(max(job.call("save", folder=str(folder), tag=TAG)))
        samples.on_disk = size_of(folder)
        samples.load.append(max(job.call("load", folder=str(folder), tag=TAG)))
        if not samples.read:
            samples.read = job.call("load_and_count", folder=str(folder), tag=TAG)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def flush_seconds(folder: Path, size: int) -> float:
    """Writing ``size`` bytes that lie in memory to one file, and flushing it."""
    block = os.urandom(1 << 20) * 16
    path = folder / "flush"
    begin = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for start in range(0, size, len(block)):
            file.write(memoryview(block)[: size - start])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


def cells_of(name: str, samples: Samples, flush: float | None) -> list[str]:
    return [
        name,
        Spread.of(samples.save).show(),
        "" if flush is None else f"{flush:.2f}",
        Spread.of(samples.load).show(),
        f"{samples.on_disk / 1e6:.0f}",
        ", ".join(f"{count / 1e6:.0f}" for count in samples.read),
    ]


def main(argv: Sequence[str] | None = None) -> Report:
    arguments = parse(argv)
    report = Report("checkpoint", arguments)
    cells: list[list[str]] = []
    data: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        for stage in arguments.stages:
            rows = contenders(arguments, stage)
            samples = {row.name: Samples() for row in rows}
            flushes: list[float] = []
            with started(rows) as jobs:
                for number in range(arguments.rounds + 1):
                    progress(f"stage {stage}, round {number} of {arguments.rounds}")
                    if number == 1:  # the first save of a process is a warm-up
                        samples = {row.name: Samples() for row in rows}
                    order = list(jobs)[:: 1 if number % 2 else -1]
                    for name in order:
                        measure(jobs[name], Path(temporary) / "checkpoint", samples[name])
                    flushes.append(flush_seconds(Path(temporary), samples[rows[0].name].on_disk))
            for row in rows:
                flush = Spread.of(flushes).median if row is rows[0] else None
                cells.append(cells_of(row.name, samples[row.name], flush))
                data[row.name] = vars(samples[row.name])
    report.table(
        f"{arguments.model} GPT, {arguments.precision}, {arguments.ranks} ranks, {arguments.rounds} rounds",
        ["", "save, s", "copy and flush, s", "load, s", "MB on disk", "MB read per rank"],
        cells,
    )
    report.data["checkpoints"] = data
    report.save()
    return report


if __name__ == "__main__":
    main()
