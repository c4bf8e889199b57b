"""Collectives of CPU tensors among ranks of one host: shared memory, our exchange over gloo, gloo's own.

Per operation and size the median time of one call, beside it how many times faster than gloo's own operation
(within each round). all_reduce of fp32 and bf16 sums; reduce_scatter and all_gather move as many bytes in all
as the size says. With `--peer`: the shared-memory all_reduce that the peer builds (`inference_all_reduce`).

    python benchmarks/comm_shared_memory.py --peer ../peer/bin/python --save cpu2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from jobs import OURS, Contender, Job, Spread, ratios, round_robin, started
from report import Report, common_arguments

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_reduce bf16")
BASELINE = "gloo"


class Collectives:
    """One rank of one contender."""

    def __init__(self, system: str) -> None:
        import os

        import torch

        self.torch = torch
        self.system = system
        if system != "gloo":
            os.environ["DS_SHM"] = "1" if system == "shared memory" else "0"
            from deepspeed import comm

            comm.init_distributed()
            self.comm = comm
            if system != "peer":
                from deepspeed.comm.collectives import communicator

                self.communicator = communicator().prepare()
                expected = "shared_memory" if system == "shared memory" else "gloo"
                assert self.communicator.transport_name("cpu") == expected
        else:
            torch.distributed.init_process_group("gloo")
        self.calls: dict[tuple[str, int], Callable[[], object]] = {}

    def run(self, operation: str, size_bytes: int, calls: int) -> float:
        """Microseconds per call."""
        key = operation, size_bytes
        if key not in self.calls:
            self.calls.clear()
            self.calls[key] = self._call(operation, size_bytes)
            self.calls[key]()
        call = self.calls[key]
        call()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls * 1e6

    def _call(self, operation: str, size_bytes: int) -> Callable[[], object]:
        torch, dist = self.torch, self.torch.distributed
        dtype = torch.bfloat16 if operation.endswith("bf16") else torch.float32
        whole = torch.zeros(size_bytes // dtype.itemsize, dtype=dtype)
        part = torch.zeros(whole.numel() // dist.get_world_size(), dtype=dtype)
        if self.system == "peer":
            return lambda: self.comm.inference_all_reduce(whole)
        if self.system == "gloo":
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return {
                "all_reduce": lambda: dist.all_reduce(whole),
                "reduce_scatter": lambda: scatter(part, whole),
                "all_gather": lambda: gather(whole, part),
            }[operation.split()[0]]
        ours = self.communicator
        return {
            "all_reduce": lambda: ours.all_reduce(whole).wait(),
            "reduce_scatter": lambda: ours.reduce_scatter(part, whole).wait(),
            "all_gather": lambda: ours.all_gather(whole, part).wait(),
        }[operation.split()[0]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Microseconds of one collective among ranks of one host.")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument(
        "--kib", nargs="+", type=int, default=[4, 64, 1024, 8192, 32768, 65536], help="sizes in KiB"
    )
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.ranks, arguments.kib, arguments.rounds = [2], [4, 1024, 8192], 3
    return arguments


def contenders(arguments: argparse.Namespace, ranks: int) -> list[Contender]:
    systems = [(BASELINE, OURS), ("ours over gloo", OURS), ("shared memory", OURS)]
    if arguments.peer:
        systems.append(("peer", arguments.peer))
    return [
        Contender(name, "comm_shared_memory:Collectives", {"system": name}, python=python, ranks=ranks)
        for name, python in systems
    ]


def measure(arguments: argparse.Namespace, ranks: int, report: Report) -> None:
    found: dict[str, dict[str, Any]] = {}
    with started(contenders(arguments, ranks)) as jobs:
        for operation in OPERATIONS:
            # The peer has only this one operation.
            names = [name for name in jobs if name != "peer" or operation.startswith("all_reduce")]
            rows = []
            for kib in arguments.kib:
                samples = round_robin(
                    {name: jobs[name] for name in names}, arguments.rounds, _measurement(operation, kib)
                )
                found[f"{operation} {kib} KiB"] = samples
                rows.append([f"{kib:,} KiB", *_cells(samples, names)])
            header = [operation]
            for name in names:
                header += [f"{name} us"] + ([] if name == BASELINE else ["x gloo"])
            report.table(f"{operation}, {ranks} ranks", header, rows)
    report.data[f"{ranks} ranks"] = found


def _measurement(operation: str, kib: int) -> Callable[[Job], float]:
    """The slowest rank's microseconds per call; small sizes are called often."""
    calls = max(1, min(200, 16384 // kib))
    return lambda job: max(job.call("run", operation=operation, size_bytes=kib << 10, calls=calls))


def _cells(samples: dict[str, list[float]], names: Sequence[str]) -> list[str]:
    cells = []
    for name in names:
        cells.append(Spread.of(samples[name]).show("{:,.0f}"))
        if name != BASELINE:
            cells.append(f"{ratios(samples[BASELINE], samples[name]).median:.1f}")
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("comm_shared_memory", arguments)
    for ranks in arguments.ranks:
        measure(arguments, ranks, report)
    report.save()


if __name__ == "__main__":
    main()
