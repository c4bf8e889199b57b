"""What experts cost beside their own products: the whole layer on two ranks, and dispatch and combine on one.

First table: forward and backward of a layer with 4 experts on 2 ranks, against a dense layer that does the same
products with the same tokens. All experts get as many tokens: what is left is routing, sorting and the exchange.
Second table: dispatch (sort, permute) and combine of one rank without an exchange, forward and backward, against the
experts' own products and against the products with one-hot tensors [tokens, experts, capacity] that they replace.

    python benchmarks/moe.py --peer ../peer/bin/python --save cpu2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from jobs import OURS, Contender, Spread, measure, ratios
from moe_rank import mlp
from report import Report, common_arguments

LAYER_GOAL, SHARE_GOAL, ONE_HOT_GOAL = 1.05, 0.15, 5.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Time of a mixture-of-experts layer against its own products.")
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank, first table")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=64, help="second table")
    parser.add_argument("--dispatched", type=int, default=8192, help="tokens, second table")
    parser.add_argument("--rounds", type=int, default=9, help="rounds over all contenders")
    parser.add_argument("--steps", type=int, default=3, help="steps per measurement")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.tokens, arguments.hidden, arguments.dispatched, arguments.experts = 64, 32, 128, 8
        arguments.rounds, arguments.steps = 2, 2
    return arguments


def contenders(arguments: argparse.Namespace, k: int) -> list[Contender]:
    shape = {
        "k": k,
        "tokens": arguments.tokens,
        "hidden": arguments.hidden,
        "wide": 4 * arguments.hidden,
        "experts": 4,
    }
    rows = [Contender(f"dense, top-{k} FLOPs", "moe_rank:LayerRank", {**shape, "moe": False})]
    for name, python in (("ours", OURS), ("peer", arguments.peer)):
        if python:
            goal = LAYER_GOAL if name == "ours" else None
            options = {**shape, "moe": True}
            rows.append(
                Contender(f"{name}, top-{k}", "moe_rank:LayerRank", options, python=python, goal=goal)
            )
    return rows


def layers(report: Report, arguments: argparse.Namespace, k: int) -> None:
    rows = contenders(arguments, k)
    found = measure(rows, arguments.rounds, arguments.steps, lambda job: {})
    base = found[rows[0].name]["seconds"]
    cells = [
        [
            row.name,
            f"{Spread.of(found[row.name]['seconds']).median * 1e3:.1f}",
            f"{Spread.of(found[row.name]['cpu_seconds']).median * 1e3:.1f}",
            ratios(found[row.name]["seconds"], base).show(),
            f"<= {row.goal:.2f}" if row.goal is not None else "",
        ]
        for row in rows
    ]
    report.table(
        f"forward and backward of 4 experts, top-{k}, 2 ranks, {arguments.tokens} tokens each, hidden "
        f"{arguments.hidden}",
        ["", "ms", "CPU ms", "to dense, median [min .. max]", "goal"],
        cells,
    )
    report.data[f"top{k}"] = {
        key: {name: each[key] for name, each in found.items()} for key in ("seconds", "cpu_seconds")
    }


class Dispatch:
    """Tokens [S, h] that choose 2 of ``experts``, with 1.25 times the even share as capacity in the one-hot form."""

    def __init__(self, tokens: int, hidden: int, experts: int) -> None:
        from deepspeed.parallel.expert.routes import Routes

        torch.manual_seed(0)
        self.tokens = torch.randn(tokens, hidden, requires_grad=True)
        chosen = torch.randn(tokens, experts).topk(2, dim=1).indices
        weights = torch.softmax(torch.randn(tokens, 2), 1).requires_grad_()
        counts = torch.bincount(chosen.view(-1), minlength=experts)
        self.routes = Routes(
            chosen, weights, torch.ones_like(chosen, dtype=torch.bool), counts, torch.zeros(()), None
        )
        self.experts = nn.ModuleList(mlp(hidden, 4 * hidden) for _ in range(experts))
        with torch.no_grad():
            self.combine_weights, self.mask = self.routes.dense(int(counts.max()))
        self.rows = torch.randn(2 * tokens, hidden, requires_grad=True)

    def sorted(self) -> None:
        """Without what experts do: their outputs are their inputs."""
        from deepspeed.parallel.expert.dispatch import TokenOrder, combine, permute

        order = TokenOrder.of(self.routes)
        combine(permute(self.tokens, order), self.routes.weights, order).sum().backward()

    def one_hot(self) -> None:
        inputs = torch.einsum("sec,sm->ecm", self.mask.to(self.tokens.dtype), self.tokens)
        torch.einsum("sec,ecm->sm", self.combine_weights, inputs).sum().backward()

    def products(self) -> None:
        runs = self.rows.split(self.routes.exp_counts.tolist())
        outputs = [expert(run) for expert, run in zip(self.experts, runs, strict=True)]
        torch.autograd.backward([output.sum() for output in outputs])


def seconds_of(work: Callable[[], None], rounds: int) -> list[float]:
    work()
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return found


def dispatch(report: Report, arguments: argparse.Namespace) -> None:
    case = Dispatch(arguments.dispatched, arguments.hidden, arguments.experts)
    found: dict[str, Any] = {
        "dispatch and combine": seconds_of(case.sorted, arguments.rounds),
        "the experts' products": seconds_of(case.products, max(arguments.rounds // 3, 1)),
        "one-hot products instead": seconds_of(case.one_hot, max(arguments.rounds // 3, 1)),
    }
    medians = {name: statistics.median(each) for name, each in found.items()}
    own, products, dense = medians.values()
    goals = [f"<= {SHARE_GOAL:.2f} of the products", "", f">= {ONE_HOT_GOAL:.0f} x"]
    shares = [f"{own / products:.3f}", "1", f"{dense / own:.1f} x dispatch and combine"]
    report.table(
        f"one rank, {arguments.dispatched} tokens, hidden {arguments.hidden}, {arguments.experts} experts, top-2, "
        f"forward and backward, {torch.get_num_threads()} threads",
        ["", "ms", "of the products", "goal"],
        [
            [name, f"{seconds * 1e3:.1f}", share, goal]
            for (name, seconds), share, goal in zip(medians.items(), shares, goals, strict=True)
        ],
    )
    report.data["dispatch"] = found


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("moe", arguments)
    for k in (2,) if arguments.quick else (1, 2):
        layers(report, arguments, k)
    dispatch(report, arguments)
    report.save()


if __name__ == "__main__":
    main()
