"""The ranks of `ds_bench` (`deepspeed/tools/bench.py`): time each collective by size and transport.

The size is that of the full tensor: the input of all_reduce, reduce_scatter and all_to_all, the output of all_gather.
The time is the slowest rank's median over its trials. Throughput is size over time; the bus bandwidth multiplies it by
the share of the tensor that each rank must send at least, so that it compares with a link's bandwidth at any world
size.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.tables import padded
from deepspeed.comm.collectives import Communicator, Network
from deepspeed.comm.groups import all_gather_single, reduce_scatter_single
from deepspeed.comm.init import init_distributed
from deepspeed.comm.pending import DONE

STEP = 4
"""Step of the exponent between measured sizes (powers of two)."""

BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "pt2pt": lambda n: 1.0,
}
_UNITS = {"Gbps": 8e-9, "GBps": 1e-9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement. ``throughput`` and ``bus_bandwidth`` are in bytes per second."""

    operation: str
    transport: str
    size_bytes: int
    seconds: float
    throughput: float
    bus_bandwidth: float


def main(argv: Sequence[str] | None = None) -> int:
    options = Namespace(**json.loads((argv or sys.argv[1:])[0]))
    init_distributed(options.backend, verbose=False)
    if dist.get_world_size() == 1:
        print("ds_bench: a single rank has no peer: start it with --num_gpus 2 or more", file=sys.stderr)
        return 2
    rows = list(measure(options))
    if dist.get_rank() == 0:
        print("\n".join(table(rows, options)))
        if options.json:
            Path(options.json).write_text(
                json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8"
            )
        if options.plot:
            plot(rows, options)
    dist.barrier()  # no rank ends while others still communicate; the group ends with the process
    return 0


def measure(options: Namespace) -> Iterator[Row]:
    dtype: torch.dtype = getattr(torch, options.dtype)
    size, device = dist.get_world_size(), _device()
    communicators = dict(_communicators(options.transport, device))
    for operation in options.operations:
        for numel in _sizes(options, dtype, size):
            for name, communicator in communicators.items():
                call = _call(operation, communicator, numel, dtype, device)
                if call is None:
                    continue
                seconds = _timed(call, options, device)
                size_bytes = numel * dtype.itemsize
                throughput = size_bytes / seconds
                yield Row(
                    operation=operation,
                    transport=name,
                    size_bytes=size_bytes,
                    seconds=seconds,
                    throughput=throughput,
                    bus_bandwidth=throughput * BUS_FACTORS[operation](size),
                )


def _device() -> torch.device:
    accelerator = get_accelerator()
    if dist.get_backend() == "gloo" or accelerator.device_name() == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    accelerator.set_device(local)
    return torch.device(accelerator.device_name(local))


def _communicators(
    wanted: Sequence[str] | None, device: torch.device
) -> Iterator[tuple[str, Communicator | None]]:
    """Yield each available transport once, by name; None stands for torch.distributed."""
    group, wanted = dist.group.WORLD, wanted or ("shared_memory", "gloo", "torch")
    assert group is not None
    attempts = [shared for shared, name in ((True, "shared_memory"), (False, "gloo")) if name in wanted]
    if device.type != "cpu":
        attempts = attempts[:1]  # device tensors go through the process group in any case
    for shared in attempts:
        communicator = Network(shared_memory=shared).communicator(group).prepare()
        yield communicator.transport_name(device.type), communicator
    if "torch" in wanted:
        yield "torch", None


def _sizes(options: Namespace, dtype: torch.dtype, ranks: int) -> list[int]:
    """Return the sizes in elements, as multiples of the world size, limited by the free memory."""
    powers = range(options.minsize, options.maxsize + 1, 1 if options.scan else STEP)
    whole = sorted({max(ranks, 2**power // ranks * ranks) for power in {*powers, options.maxsize}})
    free = torch.tensor([_free_bytes() * options.mem_factor], dtype=torch.float64, device=_device())
    dist.all_reduce(free, dist.ReduceOp.MIN)
    fitting = [numel for numel in whole if 2 * numel * dtype.itemsize <= free.item()]
    return fitting or whole[:1]


def _free_bytes() -> float:
    """Return the free memory in bytes per rank: of the device, or of the host divided by its ranks."""
    import psutil

    accelerator = get_accelerator()
    if _device().type != "cpu":
        return float(accelerator.available_memory())
    local = int(os.environ.get("LOCAL_SIZE", "0") or 0) or dist.get_world_size()
    return psutil.virtual_memory().available / local


def _call(
    operation: str, communicator: Communicator | None, numel: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], Any] | None:
    """Return a function that issues one call and returns its handle; None if the transport does not support the
    operation."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(numel, dtype=dtype, device=device)
    part = torch.zeros(numel // ranks, dtype=dtype, device=device)
    if operation == "pt2pt":
        return _pair(whole, rank) if communicator is None else None
    other = torch.zeros_like(whole) if operation == "all_to_all" else whole
    calls: dict[str, Callable[[], Any]]
    if communicator is None:
        calls = {
            "all_reduce": lambda: dist.all_reduce(whole, async_op=True),
            "all_gather": lambda: all_gather_single(whole, part, async_op=True),
            "reduce_scatter": lambda: reduce_scatter_single(part, whole, async_op=True),
            "all_to_all": lambda: dist.all_to_all_single(other, whole, async_op=True),
            "broadcast": lambda: dist.broadcast(whole, 0, async_op=True),
        }
    else:
        calls = {
            "all_reduce": lambda: communicator.all_reduce(whole),
            "all_gather": lambda: communicator.all_gather(whole, part),
            "reduce_scatter": lambda: communicator.reduce_scatter(part, whole),
            "all_to_all": lambda: communicator.all_to_all(other, whole),
            "broadcast": lambda: communicator.broadcast(whole, 0),
        }
    return calls[operation]


def _pair(tensor: Tensor, rank: int) -> Callable[[], Any]:
    """Return a call in which rank 0 sends to rank 1, which sends one element back to confirm that all has arrived."""
    answer = tensor[:1].clone()

    def call() -> Any:
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(answer, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(answer, 0)
        return DONE

    return call


def _timed(call: Callable[[], Any], options: Namespace, device: torch.device) -> float:
    """Return the seconds per call of the slowest rank."""
    for _ in range(options.warmups):
        call().wait()
    synchronize = get_accelerator().synchronize if device.type != "cpu" else lambda: None
    samples = []
    for _ in range(1 if options.async_op else options.trials):
        synchronize()
        dist.barrier()
        begin = time.perf_counter()
        handles = [call() for _ in range(options.trials if options.async_op else 1)]
        for handle in handles:
            handle.wait()
        synchronize()
        samples.append((time.perf_counter() - begin) / len(handles))
    own = statistics.median(samples)
    slowest = torch.tensor([own], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if options.debug:
        print(f"rank {dist.get_rank()}: {own * 1e6:.1f} us", flush=True)
    return slowest.item()


def table(rows: Sequence[Row], options: Namespace) -> list[str]:
    """Return the lines that rank 0 prints."""
    unit, factor = options.bw_unit, _UNITS[options.bw_unit]
    header = ("operation", "size", "transport", "time", "throughput", "bus bandwidth")
    if options.raw:
        units = ("", " [B]", "", " [us]", f" [{unit}]", f" [{unit}]")
        header = tuple(map("".join, zip(header, units, strict=True)))
    texts: list[tuple[str, ...]] = [header]
    for row in rows:
        speeds = [f"{value * factor:.3f}" for value in (row.throughput, row.bus_bandwidth)]
        if options.raw:
            cells = (str(row.size_bytes), row.transport, f"{row.seconds * 1e6:.2f}", *speeds)
        else:
            shown = (f"{speed} {unit}" for speed in speeds)
            cells = (_size_text(row.size_bytes), row.transport, _time_text(row.seconds), *shown)
        texts.append((row.operation, *cells))
    return ["  ".join(cells).rstrip() for cells in padded(texts, left=(0, 2))]


def _size_text(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def _time_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def plot(rows: Sequence[Row], options: Namespace) -> None:
    """Plot the bus bandwidth over the size: a panel per operation, a line per transport."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("ds_bench --plot needs matplotlib: pip install matplotlib") from error
    operations = list(dict.fromkeys(row.operation for row in rows))
    figure = Figure(
        figsize=(4 * min(3, len(operations)), 3.2 * -(-len(operations) // 3)), layout="constrained"
    )
    for number, operation in enumerate(operations, 1):
        axes = figure.add_subplot(-(-len(operations) // 3), min(3, len(operations)), number)
        for transport in dict.fromkeys(row.transport for row in rows):
            points = [row for row in rows if (row.operation, row.transport) == (operation, transport)]
            if points:
                sizes = [row.size_bytes for row in points]
                speeds = [row.bus_bandwidth * _UNITS[options.bw_unit] for row in points]
                axes.loglog(sizes, speeds, marker=".", label=transport)
        axes.set(title=operation, xlabel="bytes", ylabel=options.bw_unit)
        axes.legend(fontsize="small")
    figure.savefig(options.plot)


if __name__ == "__main__":
    raise SystemExit(main())
