"""Codecs of slow links (deepspeed/ops/formats/codecs.py) in one thread: native, in PyTorch operations, and a stream
of memory.

``encode`` with feedback of errors reads values and errors and writes errors and packets (12 bytes per element and the
packet); its stream is ``errors += values`` (12 bytes), which reads and writes the same arrays, but not the packet.
``decode`` reads packets and writes values; its stream fills them. The share is of the stream's bytes per second, those
read and those written, in the same round: no codec can be faster than memory.

    python benchmarks/codecs.py --save cpu1
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from report import Report, common_arguments


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Speed of codecs in one thread, beside that of memory.")
    parser.add_argument("--numel", type=int, default=16_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.numel, arguments.rounds = 1_000_000, 3
    return arguments


def contenders(codec: Any, numel: int) -> dict[str, tuple[Callable[[], object], float]]:
    """By name: what to run, and the bytes that it moves."""
    import torch

    from deepspeed.ops.formats.codecs import Codec

    values, errors, out = torch.randn(numel), torch.randn(numel), torch.empty(numel)
    packet = codec.encode(values)
    fed, read = 12 * numel + packet.numel(), 4 * numel + packet.numel()
    return {
        "encode": (lambda: codec.encode(values, errors), fed),
        "encode in PyTorch": (lambda: Codec.encode(codec, values, errors), fed),
        "its stream": (lambda: out.add_(values), 12 * numel),
        "decode": (lambda: codec.decode(packet, numel, out=out), read),
        "decode in PyTorch": (lambda: out.copy_(codec.unpack(packet, numel)), read),
        "fill": (lambda: out.fill_(1.0), 4 * numel),
    }


def seconds_of(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure(runs: dict[str, tuple[Callable[[], object], float]], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, (function, _) in runs.items():
            if number > 1 and "PyTorch" in name and rounds > 5 and number % 5:
                continue  # slow, and of less interest
            seconds = seconds_of(function)
            if number:
                found[name].append(seconds)
    return found


def rows(name: str, runs: dict[str, Any], found: dict[str, list[float]]) -> list[list[str]]:
    result = []
    for what, stream in (("encode", "its stream"), ("decode", "fill")):
        rate = {
            key: runs[key][1] / statistics.median(found[key]) / 1e9
            for key in (what, f"{what} in PyTorch", stream)
        }
        result.append(
            [
                f"{what} {name}",
                f"{rate[what]:.1f}",
                f"{rate[f'{what} in PyTorch']:.2f}",
                f"{rate[stream]:.1f}",
                f"{rate[what] / rate[stream]:.0%}",
                f"{statistics.median(found[what]) * 1e3:.1f}",
            ]
        )
    return result


def main(argv: Sequence[str] | None = None) -> None:
    import torch

    from deepspeed.ops import native
    from deepspeed.ops.formats.codecs import codec_named

    arguments = parse(argv)
    torch.set_num_threads(1)
    report = Report("codecs", arguments)
    report.line(
        f"one thread, {arguments.numel:,} elements, {native.isa()}, median of {arguments.rounds} rounds"
    )
    table: list[list[str]] = []
    for name in ("signs", "int8", "int4", "fp8", "top_k"):
        runs = contenders(codec_named(name), arguments.numel)
        found = measure(runs, arguments.rounds)
        table += rows(name, runs, found)
        report.data[name] = found
    report.table(
        "fp32 values; encode with feedback of errors",
        ["", "GB/s", "in PyTorch", "stream", "of the stream", "ms"],
        table,
    )
    report.save()


if __name__ == "__main__":
    main()
