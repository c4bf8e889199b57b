"""Reads and writes of one file: our `aio_handle`, the peer's, and fio, with the same requests.

Everyone uses direct access, 1 MiB requests, 32 of them under way, and the same file. "New" makes the file, "rewrite"
writes over it, "read" reads it. Handles move a tensor of locked memory ("pinned") or one of `torch.empty` ("plain");
fio has no such difference: its memory is aligned.

    python benchmarks/nvme.py --folder /local_nvme --peer ../peer/bin/python --save local
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from jobs import Contender, Spread, ratios, round_robin, started
from report import Report, common_arguments

KINDS = ("new", "rewrite", "read")
BLOCK, DEPTH = 1 << 20, 32


class Handle:
    """The process of one `aio_handle`, ours or the peer's."""

    def __init__(self, folder: str, nbytes: int) -> None:
        import torch

        from deepspeed.ops.op_builder import AsyncIOBuilder

        self.path = os.path.join(folder, "_benchmark_nvme.bin")
        self.handle = AsyncIOBuilder().load().aio_handle(BLOCK, DEPTH, False, True, 1)
        plain = torch.ones(nbytes, dtype=torch.uint8)
        pinned = self.handle.new_cpu_locked_tensor(nbytes, plain)
        pinned.fill_(2)
        self.tensors = {"plain": plain, "pinned": pinned}

    def run(self, kind: str, memory: str) -> float:
        """GB/s."""
        tensor = self.tensors[memory]
        if kind == "new":
            Path(self.path).unlink(missing_ok=True)
        begin = time.perf_counter()
        if kind == "read":
            self.handle.sync_pread(tensor, self.path)
        else:
            self.handle.sync_pwrite(tensor, self.path)
        return tensor.numel() / (time.perf_counter() - begin) / 1e9


class Fio:
    """The process that runs fio."""

    def __init__(self, folder: str, nbytes: int) -> None:
        self.path = os.path.join(folder, "_benchmark_nvme.bin")
        self.nbytes = nbytes

    def run(self, kind: str, memory: str) -> float:
        """GB/s, as fio reports them."""
        if kind == "new":
            Path(self.path).unlink(missing_ok=True)
        way = "read" if kind == "read" else "write"
        options = {"filename": self.path, "rw": way, "size": self.nbytes, "bs": BLOCK, "iodepth": DEPTH}
        engine = ["--name=job", "--direct=1", "--ioengine=io_uring", "--thread", "--output-format=json"]
        command = ["fio", *engine, *[f"--{key}={value}" for key, value in options.items()]]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return json.loads(text[text.index("{") :])["jobs"][0][way]["bw_bytes"] / 1e9


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("GB/s of reading and writing one file.")
    parser.add_argument("--folder", default=".", help="directory on the disk to measure")
    parser.add_argument("--mib", type=int, default=1024, help="size of the file")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.mib, arguments.rounds = 128, 3
    return arguments


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    options = {"folder": os.path.abspath(arguments.folder), "nbytes": arguments.mib << 20}
    rows = [Contender("ours", "nvme:Handle", options, ranks=1)]
    if arguments.peer:
        rows.append(Contender("peer", "nvme:Handle", options, python=arguments.peer, ranks=1))
    if shutil.which("fio"):
        rows.append(Contender("fio", "nvme:Fio", options, ranks=1))
    return rows


def measure(arguments: argparse.Namespace, report: Report) -> None:
    rows = contenders(arguments)
    with started(rows) as jobs:
        for job in jobs.values():
            job.call("run", kind="new", memory="plain")
        for memory in ("pinned", "plain"):
            cells = []
            for kind in KINDS:
                samples = round_robin(
                    jobs,
                    arguments.rounds,
                    lambda job, kind=kind, memory=memory: job.call("run", kind=kind, memory=memory)[0],
                )
                report.data[f"{kind}_{memory}"] = samples
                for name, values in samples.items():
                    ratio = "" if name == "ours" else ratios(samples["ours"], values).show()
                    cells.append([kind, name, Spread.of(values).show(), ratio])
            header = ["", "", "GB/s, median [min .. max]", "ours / this, per round"]
            report.table(f"{arguments.mib} MiB, {memory} memory", header, cells)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("nvme", arguments)
    try:
        measure(arguments, report)
    finally:
        Path(arguments.folder, "_benchmark_nvme.bin").unlink(missing_ok=True)
    report.save()


if __name__ == "__main__":
    main()
