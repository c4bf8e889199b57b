"""Block-sparse attention against torch's dense attention, forward and backward, on one process.

Each row is a pattern at a length: its density (share of the blocks that exist), seconds of both, and how the gain
compares with what the density would allow. Memory is counted: the most that forward and
backward allocate beside the inputs.

    python benchmarks/sparse_attention.py
    python benchmarks/sparse_attention.py --length 16384 --block 64 --heads 8
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from report import Report, common_arguments

sys.path.insert(0, str(Path(__file__).parents[1]))

from deepspeed.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseSelfAttention,
    SparsityConfig,
)
from tests.allocations import counted

MIB = 2**20
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def patterns(heads: int, block: int) -> dict[str, SparsityConfig]:
    return {
        "fixed": FixedSparsityConfig(heads, block),
        "fixed, unidirectional": FixedSparsityConfig(heads, block, attention="unidirectional"),
        "bigbird": BigBirdSparsityConfig(heads, block),
        "bslongformer": BSLongformerSparsityConfig(heads, block),
        "sliding window": LocalSlidingWindowSparsityConfig(heads, block, num_sliding_window_blocks=9),
    }


def inputs(arguments: argparse.Namespace, length: int) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (arguments.batch, arguments.heads, length, arguments.size)
    dtype = getattr(torch, arguments.dtype)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]


def seconds(attention: Attention, tensors: list[Tensor], rounds: int) -> float:
    """The best of some rounds, after one that is not counted."""
    best = math.inf
    grad = torch.randn_like(tensors[0])
    for round in range(rounds + 1):
        start = time.perf_counter()
        torch.autograd.grad(attention(*tensors), tensors, grad)
        if round:
            best = min(best, time.perf_counter() - start)
    return best


def peak(attention: Attention, tensors: list[Tensor]) -> float:
    """MiB."""
    with counted() as memory:
        torch.autograd.grad(attention(*tensors).sum(), tensors)
    return memory.peak / MIB


def measure(arguments: argparse.Namespace, length: int, rounds: int) -> list[dict[str, Any]]:
    tensors = inputs(arguments, length)
    dense = seconds(scaled_dot_product_attention, tensors, rounds)
    found = []
    for name, pattern in patterns(arguments.heads, arguments.block).items():
        attention = SparseSelfAttention(pattern, max_seq_length=length)
        plan = attention.plan(arguments.heads, length)
        sparse = seconds(attention, tensors, rounds)
        density = plan.blocks / (plan.heads * plan.rows * plan.columns)
        found.append(
            {
                "length": length,
                "pattern": name,
                "density": density,
                "dense": dense,
                "sparse": sparse,
                "gain": dense / sparse,
                "of_ideal": dense / sparse * density,
                "peak_mib": peak(attention, tensors),
                "scores_mib": arguments.batch * arguments.heads * length**2 * 4 / MIB,
            }
        )
    return found


def flex_of(layout: Tensor, block: int) -> Attention:
    """FlexAttention, compiled, over the blocks of ``layout`` [blocks, blocks]."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    exists, length = layout.bool(), layout.shape[0] * block
    mask = create_block_mask(
        lambda batch, head, row, column: exists[row // block, column // block],
        None, None, length, length, device="cpu", BLOCK_SIZE=block,
    )  # fmt: skip
    compiled = torch.compile(flex_attention)
    return lambda query, key, value: compiled(query, key, value, block_mask=mask)


@torch.no_grad()
def against_flex(arguments: argparse.Namespace, length: int, rounds: int) -> list[list[str]]:
    """A row for each pattern; rounds of both alternate, and the ratio has its range over them."""
    tensors = [tensor.detach() for tensor in inputs(arguments, length)]
    rows = []
    for name, pattern in patterns(arguments.heads, arguments.block).items():
        ours = SparseSelfAttention(pattern, max_seq_length=length)
        both = (flex_of(ours.master_layout[0], arguments.block), ours)
        results = [attention(*tensors) for attention in both]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        times: list[list[float]] = []
        for _ in range(rounds):
            times.append([])
            for attention in both:
                start = time.perf_counter()
                attention(*tensors)
                times[-1].append(time.perf_counter() - start)
        flex, sparse = (min(each) for each in zip(*times, strict=True))
        ratios = sorted(of_flex / of_ours for of_flex, of_ours in times)
        gain = f"{ratios[len(ratios) // 2]:.2f} [{ratios[0]:.2f} .. {ratios[-1]:.2f}]"
        rows.append([str(length), name, f"{flex:.3f}", f"{sparse:.3f}", gain])
    return rows


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 8192, 16384], help="tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="of a head")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--flex", action="store_true", help="against FlexAttention instead of dense attention"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lengths, rounds = ([2048, 4096], 1) if arguments.quick else (arguments.length, arguments.rounds)
    report = Report("sparse_attention", arguments)
    if arguments.flex:
        table = [row for length in lengths for row in against_flex(arguments, length, rounds)]
        report.data["flex"] = table
        report.table(
            f"forward, {arguments.heads} heads of {arguments.size}, blocks of {arguments.block}, {arguments.dtype}, "
            f"threads: {arguments.threads}",
            ["tokens", "pattern", "FlexAttention s", "ours s", "x FlexAttention"],
            table,
        )
        report.save()
        return
    rows = [row for length in lengths for row in measure(arguments, length, rounds)]
    report.data["rows"] = rows
    report.table(
        f"forward and backward, {arguments.heads} heads of {arguments.size}, blocks of {arguments.block}, "
        f"{arguments.dtype}, threads: {arguments.threads}",
        [
            "tokens",
            "pattern",
            "density",
            "dense s",
            "sparse s",
            "gain",
            "x density",
            "MiB",
            "dense scores MiB",
        ],
        [
            [
                str(row["length"]),
                row["pattern"],
                f"{row['density']:.3f}",
                f"{row['dense']:.3f}",
                f"{row['sparse']:.3f}",
                f"{row['gain']:.2f}",
                f"{row['of_ideal']:.2f}",
                f"{row['peak_mib']:.0f}",
                f"{row['scores_mib']:.0f}",
            ]
            for row in rows
        ],
    )
    report.save()


if __name__ == "__main__":
    main()
