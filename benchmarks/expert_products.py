"""The products of many experts on one rank: ways of computing them, against one dense layer of equal FLOPs.

Forward and backward of two-layer perceptrons on rows that are sorted by expert, in uneven runs, one thread. Module
weights: each expert is a module with weights of its own (deepspeed.moe); stacked: one tensor for all (Transformers).

    python benchmarks/expert_products.py --save cpu
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rank import mlp
from report import Report, common_arguments

SHAPES = ((2048, 1024, 4096, 2), (4096, 512, 2048, 64), (2048, 256, 1024, 32))
"""Rows, hidden, width of an expert, experts."""


class Case:
    """All ways take ``inputs`` [rows, hidden] sorted by expert, and return as many outputs."""

    def __init__(self, rows: int, hidden: int, wide: int, experts: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(rows, hidden, dtype=dtype, requires_grad=True)
        self.gradient = torch.randn(rows, hidden, dtype=dtype)
        self.counts = torch.bincount(torch.randint(experts, (rows,)), minlength=experts)
        self.ends = self.counts.cumsum(0).to(torch.int32)
        self.runs: list[int] = self.counts.tolist()
        self.single = mlp(hidden, wide).to(dtype)
        self.modules = nn.ModuleList(mlp(hidden, wide).to(dtype) for _ in range(experts))
        self.up = (torch.randn(experts, wide, hidden, dtype=dtype) / hidden**0.5).requires_grad_()
        self.down = (torch.randn(experts, hidden, wide, dtype=dtype) / wide**0.5).requires_grad_()

    def dense(self) -> Tensor:
        return self.single(self.inputs)

    def loop_over_modules(self) -> Tensor:
        from deepspeed.moe.experts import Experts

        return Experts.forward(self, self.inputs, self.runs)  # type: ignore[arg-type]

    @property
    def deepspeed_experts(self) -> nn.ModuleList:
        return self.modules

    def loop_over_stacked(self) -> Tensor:
        parts = zip(self.inputs.split(self.runs), self.up.unbind(0), self.down.unbind(0), strict=True)
        return torch.cat([F.gelu(run @ up.t()) @ down.t() for run, up, down in parts])

    def one_call(self) -> Tensor:
        from deepspeed.parallel.expert.grouped import grouped_linear

        made = grouped_linear(self.inputs, self.up.transpose(1, 2), self.runs)
        return grouped_linear(F.gelu(made), self.down.transpose(1, 2), self.runs)

    def grouped_mm(self) -> Tensor:
        made = torch._grouped_mm(self.inputs, self.up.transpose(1, 2), offs=self.ends)
        return torch._grouped_mm(F.gelu(made), self.down.transpose(1, 2), offs=self.ends)

    def padded_bmm(self) -> Tensor:
        padded = nn.utils.rnn.pad_sequence(list(self.inputs.split(self.runs)), batch_first=True)
        made = F.gelu(padded.bmm(self.up.transpose(1, 2))).bmm(self.down.transpose(1, 2))
        return torch.cat([each[:count] for each, count in zip(made, self.runs, strict=True)])

    def step(self, way: Callable[[], Tensor]) -> float:
        begin = time.perf_counter()
        way().backward(self.gradient)
        seconds = time.perf_counter() - begin
        for tensor in (self.inputs, self.up, self.down):
            tensor.grad = None
        self.single.zero_grad()
        self.modules.zero_grad()
        return seconds


def measured(case: Case, rounds: int) -> dict[str, list[float]]:
    """In turn, so that a slow moment of the machine hits neighbours."""
    ways: dict[str, Callable[[], Tensor]] = {
        "dense, one product": case.dense,
        "module weights, loop (deepspeed.moe)": case.loop_over_modules,
        "stacked weights, one call (expert_parallel)": case.one_call,
        "stacked weights, loop": case.loop_over_stacked,
        "stacked weights, padded bmm": case.padded_bmm,
    }
    if hasattr(torch, "_grouped_mm"):
        ways["stacked weights, torch._grouped_mm"] = case.grouped_mm
    for way in ways.values():
        case.step(way)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(case.step(way))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = Report("expert_products", arguments)
    shapes = [(64, 32, 64, 4)] if arguments.quick else SHAPES
    results: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for rows, hidden, wide, experts in shapes:
            found = measured(Case(rows, hidden, wide, experts, dtype), arguments.rounds)
            base = found["dense, one product"]
            title = f"{rows} rows, hidden {hidden}, experts of width {wide}: {experts}, {str(dtype)[6:]}"
            report.table(
                title,
                ["", "ms", "to dense"],
                [
                    [
                        name,
                        f"{statistics.median(times) * 1e3:.1f}",
                        f"{statistics.median(t / b for t, b in zip(times, base, strict=True)):.2f}",
                    ]
                    for name, times in found.items()
                ],
            )
            results[title] = found
    report.data["seconds"] = results
    report.save()


if __name__ == "__main__":
    main()
