"""Floating-point numbers of 6, 8 and 12 bits (deepspeed/ops/fp_quantizer), made and read, beside a stream of memory.

``quantize`` reads values and writes codes, ``dequantize`` the other way round; the round trip is both. The stream moves
the same bytes, those read and those written: it copies fp32 numbers, half of which are read and half written. The share
is of its time, in the same round. Like with like is the round trip: it reads as many bytes as it writes, as the copy
does; ``quantize`` alone writes fewer (and lines that are written are read first), ``dequantize`` alone more.
``in PyTorch`` is the path without the native library. glibc is told to keep freed memory: else new pages for each
result take longer than everything else.

    python benchmarks/fp_quantizer.py --save cpu
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch

from report import Report, common_arguments

Run = Callable[[], object]


def contenders(numel: int, bits: int, dtype: torch.dtype) -> dict[str, Run]:
    from deepspeed.ops import native
    from deepspeed.ops.fp_quantizer import FP_Quantize

    quantizer = FP_Quantize()
    values, out = torch.randn(numel).to(dtype), torch.empty(numel, dtype=dtype)
    packed = quantizer.quantize(values, q_bits=bits)
    assert isinstance(packed, torch.Tensor)
    moved = values.numel() * values.element_size() + packed.numel()
    source, target = torch.randn(moved // 8), torch.empty(moved // 8)

    def quantize() -> object:
        return quantizer.quantize(values, q_bits=bits)

    def dequantize() -> object:
        return quantizer.dequantize(packed, fp_out=out, q_bits=bits)

    def in_pytorch(run: Run) -> Run:
        def without() -> object:
            with mock.patch.object(native, "library", lambda: None):
                return run()

        return without

    return {
        "quantize": quantize,
        "dequantize": dequantize,
        "stream": lambda: target.copy_(source),
        "quantize in PyTorch": in_pytorch(quantize),
        "dequantize in PyTorch": in_pytorch(dequantize),
    }


def keep_freed_memory() -> None:
    """glibc: no mappings of their own for large blocks, nothing given back."""
    with contextlib.suppress(AttributeError, OSError):
        for option, value in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, value)


def measure(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median seconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            if "PyTorch" in name and number > 2:
                continue  # slow
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    from deepspeed.ops import native

    parser = common_arguments(__doc__ or "")
    parser.add_argument("--numel", type=int, default=32_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--bits", nargs="+", type=int, default=[6, 8, 12])
    arguments: argparse.Namespace = parser.parse_args()
    if arguments.quick:
        arguments.numel, arguments.rounds = 1_000_000, 3
    keep_freed_memory()
    report = Report("fp_quantizer", arguments)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        rows: list[list[Any]] = []
        for dtype in (torch.float32, torch.bfloat16):
            for bits in arguments.bits:
                found = measure(contenders(arguments.numel, bits, dtype), arguments.rounds)
                name = f"{str(dtype).removeprefix('torch.')}, {bits} bits"
                report.data[f"{name}, {threads} threads"] = found
                both = found["quantize"] + found["dequantize"]
                slow = found["quantize in PyTorch"] + found["dequantize in PyTorch"]
                shares = [found["stream"] / found[what] for what in ("quantize", "dequantize")]
                cells = [f"{share:.0%}" for share in (*shares, 2 * found["stream"] / both)]
                rows.append([name, f"{both * 1e3:.1f}", *cells, f"{slow / both:.1f}"])
        report.table(
            f"{arguments.numel:,} numbers, {native.isa()}, threads: {threads}, median of {arguments.rounds}",
            ["", "round trip ms", "quantize of the stream", "dequantize", "round trip", "x PyTorch"],
            rows,
        )
    report.save()


if __name__ == "__main__":
    main()
