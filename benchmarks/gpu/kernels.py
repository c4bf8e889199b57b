"""The Triton kernels of `deepspeed/ops/gpu` on one CUDA GPU: time of each, beside PyTorch's operations.

NOT YET RUN: written where there was no GPU.

    python benchmarks/gpu/kernels.py --save h200

Each line has the kernel's time, that of PyTorch's operations for the same result, and the bytes that have to move per
second of the kernel: for all but the products of experts, memory is the limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn import functional

from report import Report, common_arguments

Pair = tuple[str, Callable[[], object], Callable[[], object], int]
"""Name, the kernel, PyTorch's operations, bytes that have to move."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Triton kernels on one CUDA GPU (not yet run).")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.width, arguments.tokens = 512, 256
    return arguments


def pairs(width: int, tokens: int) -> Iterator[Pair]:
    from deepspeed.ops.formats.codecs import BlockCodec, SignCodec
    from deepspeed.ops.formats.small_floats import FORMATS
    from deepspeed.ops.gpu import codecs as packets
    from deepspeed.ops.gpu import gates, integer_products, norms, small_floats
    from deepspeed.ops.gpu import grouped_gemm as grouped_products
    from deepspeed.ops.host_graph import Activation
    from deepspeed.ops.small_product import QuantizedMatrix

    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(width, width, device="cuda")
    for rows in (1, 16, 64):
        few, plain = x[:rows], weight.bfloat16()
        for bits in (8, 4):
            m = QuantizedMatrix.of(weight, bits, 128)
            yield (
                f"product of {rows} rows, int{bits}",
                lambda m=m, few=few: integer_products.product(
                    few, m.words, m.scales, None, bits=m.bits, columns=m.columns
                ),
                lambda few=few, plain=plain: functional.linear(few, plain),
                m.words.nbytes + m.scales.nbytes,
            )
    experts = torch.randn(8, width, width, device="cuda", dtype=torch.bfloat16)
    counts = [tokens // 8] * 8
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    yield (
        "products of 8 experts",
        lambda: grouped_products.product(x, experts, ends),
        lambda: [a @ b for a, b in zip(x.split(counts), experts, strict=True)],
        2 * x.nbytes + experts.nbytes,
    )
    scale = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    yield (
        "norm of the sum with a residual",
        lambda: norms.norm(x, scale, residual=x),
        lambda: functional.rms_norm(x + x, (width,), scale),
        4 * x.nbytes,
    )
    yield (
        "gate",
        lambda: gates.gated(x, x, Activation.SILU),
        lambda: functional.silu(x) * x,
        3 * x.nbytes,
    )
    flat = x.flatten()
    for codec in (BlockCodec(8), BlockCodec(4), SignCodec()):
        made = torch.empty(codec.nbytes(flat.numel()), device="cuda", dtype=torch.uint8)
        yield (
            f"packets {codec}",
            lambda codec=codec, made=made: packets.encode(made, flat, codec.codes, codec.block),
            lambda codec=codec: codec.pack(flat),
            flat.nbytes + made.nbytes,
        )
    for bits, form in FORMATS.items():
        parts = form.exponent, form.mantissa, form.codes, form.largest
        yield (
            f"floats of {bits} bits",
            lambda parts=parts: small_floats.encode(flat, 512, *parts, seed=None),
            lambda form=form: form.encode(flat.float()),
            flat.nbytes + flat.numel() * bits // 8,
        )


def seconds(call: Callable[[], object], rounds: int) -> float:
    """The median time of a call, after up to three that compile and warm up."""
    for _ in range(min(3, rounds)):
        call()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[len(times) // 2]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    rows = []
    for name, kernel, plain, nbytes in pairs(arguments.width, arguments.tokens):
        ours, torchs = (seconds(call, arguments.rounds) for call in (kernel, plain))
        rows.append([name, f"{ours * 1e6:.0f}", f"{torchs * 1e6:.0f}", f"{nbytes / ours / 1e9:.0f}"])
    report = Report("gpu_kernels", arguments)
    report.table(
        f"width {arguments.width}, {arguments.tokens} tokens", ["kernel", "us", "us in PyTorch", "GB/s"], rows
    )
    report.save()


if __name__ == "__main__":
    main()
