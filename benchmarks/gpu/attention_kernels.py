"""Attention kernels on one CUDA GPU: block-sparse, paged and the Evoformer's, beside plain torch and dense SDPA.

NOT YET RUN: written where there was no GPU. Each row is checked against plain torch first; what runs out of memory or
is not taken says so in its cell and stops nothing else.

    python benchmarks/gpu/attention_kernels.py --save h100
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepspeed.inference.cache.pages import LayerShape, PagedCache, PagePiece
from deepspeed.inference.model.attention import AttentionTerms, PackedBatch, paged_attention
from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention, evoformer_attn
from deepspeed.ops.sparse_attention import (
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    SparsityConfig,
    block_attention,
)
from report import Report, common_arguments

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Attention kernels on one CUDA GPU (not yet run).")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 16384])
    parser.add_argument("--blocks", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.lengths, arguments.contexts, arguments.blocks, arguments.rounds = [256], [512], [16, 64], 1
    return arguments


def milliseconds(call: Callable[[], object], rounds: int) -> float:
    """Median, after two calls that compile and warm up."""
    for _ in range(2):
        call()
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def cell(call: Callable[[], object], rounds: int) -> str:
    try:
        return f"{milliseconds(call, rounds):.3f}"
    except Exception as error:  # a row that fails is a result, and others are to come
        torch.cuda.empty_cache()
        return type(error).__name__


def trained(call: Callable[..., Tensor], of: list[Tensor]) -> Callable[[], object]:
    """Forward and backward."""

    def step() -> None:
        out = call()
        torch.autograd.grad(out, of, torch.ones_like(out))

    return step


@contextmanager
def without_kernels() -> Iterator[None]:
    with (
        mock.patch.object(block_attention, "fits_gpu", lambda *_: False),
        mock.patch.object(evoformer_attn, "usable", lambda *_: False),
    ):
        yield


def error(found: Tensor, expected: Tensor) -> str:
    """The largest, as a part of the largest value."""
    found, expected = found.detach(), expected.detach()
    return f"{float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6)):.1e}"


def compared(
    call: Callable[[], Tensor], dense: Callable[[], Tensor] | None, of: list[Tensor], rounds: int
) -> list[str]:
    """Cells: error, forward by kernel, torch and SDPA, then with backward."""
    cells = []
    try:
        found = call()
        with without_kernels():
            cells.append(error(found.float(), call().float()))
    except Exception as problem:
        torch.cuda.empty_cache()
        cells.append(type(problem).__name__)
    for step in (lambda each: each, lambda each: trained(each, of)):
        cells.append(cell(step(call), rounds))
        with without_kernels():
            cells.append(cell(step(call), min(rounds, 3)))
        cells.append("" if dense is None else cell(step(dense), rounds))
    return cells


HEADER = ["error", "kernel", "torch", "dense SDPA", "kernel fwd+bwd", "torch fwd+bwd", "dense SDPA fwd+bwd"]


def sparse(report: Report, arguments: argparse.Namespace) -> None:
    rows = []
    for length in arguments.lengths:
        for block in arguments.blocks:
            fixed = FixedSparsityConfig(12, block=block, attention="unidirectional")
            rows.append(sparse_row(f"fixed {length}", fixed, length, arguments))
            random = BigBirdSparsityConfig(12, block=block, num_random_blocks=1)
            rows.append(sparse_row(f"BigBird {length}", random, length, arguments))
    report.table("block-sparse attention, 12 heads of 64, ms", ["", *HEADER], rows)
    report.data["sparse"] = rows


def sparse_row(name: str, config: SparsityConfig, length: int, arguments: argparse.Namespace) -> list[str]:
    layout = config.make_layout(length)
    plan, causal = (
        block_attention.LayoutPlan(layout, config.block),
        getattr(config, "attention", "") == "unidirectional",
    )
    q, k, v = (_drawn(1, 12, length, 64, dtype=arguments.dtype) for _ in range(3))

    def run() -> Tensor:
        return block_attention.block_attention(q, k, v, plan, block_attention.Masks(causal=causal), 0.125)

    def dense() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    name = f"{name}, blocks of {config.block}, density {float(layout.float().mean()):.3f}"
    return [name, *compared(run, dense, [q, k, v], arguments.rounds)]


def paged(report: Report, arguments: argparse.Namespace) -> None:
    heads, kv_heads, size, block = 32, 8, 128, 64
    dtype, rows = DTYPES[arguments.dtype], []
    for context in arguments.contexts:
        for sequences, tokens in ((1, 1), (16, 1), (1, 512)):
            blocks = -(-context // block)
            cache = PagedCache(
                {0: LayerShape(kv_heads, size, size, dtype, torch.device("cuda"))}, blocks * sequences, block
            )
            for pages in cache.pages(0):
                pages.normal_()
            pieces = [
                PagePiece([0] * tokens, context - tokens, range(i * blocks, (i + 1) * blocks))
                for i in range(sequences)
            ]
            count = sequences * tokens
            q = torch.randn(heads, count, size, device="cuda", dtype=dtype)
            k, v = (torch.randn(kv_heads, count, size, device="cuda", dtype=dtype) for _ in range(2))
            calls, on_gpu = [], cache.is_on_gpu
            for cache.is_on_gpu in (on_gpu, False):
                batch = PackedBatch(pieces, cache, q.device)
                calls.append(
                    lambda q=q, k=k, v=v, batch=batch: paged_attention(
                        q, k, v, batch, 0, AttentionTerms(size**-0.5)
                    )
                )
            read = sequences * context * kv_heads * size * 2 * dtype.itemsize
            kernel = cell(calls[0], arguments.rounds)
            speed = f"{read / float(kernel) / 1e6:.0f}" if kernel[0].isdigit() else ""
            rows.append(
                [
                    f"{sequences} x {tokens} tokens after {context}",
                    error(calls[0]().float(), calls[1]().float()),
                    kernel,
                    speed,
                    cell(calls[1], min(arguments.rounds, 5)),
                ]
            )
    title = f"paged attention, {heads} heads of {size} that share {kv_heads}, pages of {block}; both store new keys"
    report.table(title, ["", "error", "kernel, ms", "GB/s of keys and values", "torch, ms"], rows)
    report.data["paged"] = rows


def evoformer(report: Report, arguments: argparse.Namespace) -> None:
    sizes = [(8, 64, 8, 32)] if arguments.quick else [(128, 256, 8, 32), (256, 256, 4, 32)]
    rows = [evoformer_row(*size, arguments) for size in sizes]
    report.table("Evoformer attention with both biases, ms", ["", *HEADER], rows)
    report.data["evoformer"] = rows


def evoformer_row(
    sequences: int, tokens: int, heads: int, size: int, arguments: argparse.Namespace
) -> list[str]:
    q, k, v = (_drawn(1, sequences, tokens, heads, size, dtype=arguments.dtype) for _ in range(3))
    mask = _drawn(1, sequences, 1, 1, tokens, dtype=arguments.dtype)
    pairs = _drawn(1, 1, heads, tokens, tokens, dtype=arguments.dtype)

    def run() -> Tensor:
        return DS4Sci_EvoformerAttention(q, k, v, [mask, pairs])

    def dense() -> Tensor:
        by_head = (x[0].transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(*by_head, attn_mask=mask[0] + pairs[0])
        return out.transpose(1, 2)[None]

    name = f"{sequences} sequences of {tokens}, {heads} heads of {size}"
    return [name, *compared(run, dense, [q, k, v, mask, pairs], arguments.rounds)]


def _drawn(*shape: int, dtype: str) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPES[dtype]).requires_grad_()


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    report = Report("gpu_attention_kernels", arguments)
    report.line(f"{torch.cuda.get_device_name()}, {arguments.dtype}")
    for part in (sparse, paged, evoformer):
        try:
            part(report, arguments)
        except Exception as error:
            report.line(f"{part.__name__}: {type(error).__name__}: {error}")
    report.save()


if __name__ == "__main__":
    main()
