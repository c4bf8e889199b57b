"""AdamW with moments in 8 bits and bfloat16 masters, against moments and masters in fp32: speed and loss.

Speed: one step on host memory with gradients in bf16. fp32 masters, fp32 moments and the bf16 weights that are made
from them take 26 bytes of traffic and 18 of memory per parameter; bf16 weights alone with 8-bit moments 10 and 6.

Loss: the small model of examples/pretrain_gpt on its text with the demo's schedule, bf16, from several seeds, with
8-bit moments, with bf16 masters and with both, and how far the means over the last tenth of the steps and the
validation losses are from those of fp32; how far apart two runs in fp32 end by chance stands beside.

    python benchmarks/compact_adam.py --save cpu
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch

from report import Report, common_arguments
from text_loss import ADAM, compare

SMALL: dict[str, Any] = {"state_bits": 8, "stochastic_rounding": True}


def steps_of(numel: int) -> dict[str, Any]:
    """What takes one step, by name; the arrays of all exist at once."""
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.adam.compact_adam import CompactAdam

    grad = torch.randn(numel).to(torch.bfloat16)
    wide, low = torch.randn(numel), torch.zeros(numel, dtype=torch.bfloat16)
    narrow = wide.to(torch.bfloat16)
    settings = {**ADAM, "betas": tuple(ADAM["betas"])}
    one, other = FusedAdam([wide], **settings), CompactAdam([narrow], **settings, **SMALL)
    half = CompactAdam([wide.clone()], **settings, state_bits=8)
    return {
        "fp32 masters and moments": lambda: one.multi_tensor_step(
            one.param_groups[0], [wide], [grad], low_precision=[low]
        ),
        "fp32 masters, 8-bit moments": lambda: half.multi_tensor_step(
            half.param_groups[0], half.param_groups[0]["params"], [grad], low_precision=[low]
        ),
        "bf16 masters, 8-bit moments": lambda: other.multi_tensor_step(
            other.param_groups[0], [narrow], [grad]
        ),
    }


@torch.no_grad()
def speed(arguments: argparse.Namespace, report: Report) -> None:
    steps = steps_of(arguments.millions * 1_000_000)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(arguments.rounds + 1):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                times[name].append((time.perf_counter() - start) * 1e3)
        found = {name: median(values[1:]) for name, values in times.items()}
        first = next(iter(found.values()))
        report.data[f"ms, {threads} threads"] = found
        report.table(
            f"ms per step of {arguments.millions}M parameters, threads: {threads}, median of {arguments.rounds}",
            ["", "ms", "times as fast"],
            [[name, f"{value:.1f}", f"{first / value:.2f}"] for name, value in found.items()],
        )


def loss(arguments: argparse.Namespace, report: Report) -> None:
    narrow = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    others = {
        "8-bit moments": {"adam": {"state_bits": 8}},
        "bf16 masters": {"adam": {"stochastic_rounding": True}, "config": narrow},
        "both": {"adam": SMALL, "config": narrow},
    }
    chosen = {name: others[name] for name in arguments.contenders or others}
    compare(report, arguments.seeds, arguments.steps, "fp32", chosen)


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--millions", type=int, default=100, help="parameters of one step, in millions")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="for the loss; the demo's most")
    parser.add_argument(
        "--contenders", nargs="+", choices=["8-bit moments", "bf16 masters", "both"], help="for the loss"
    )
    parser.add_argument("--only", choices=["speed", "loss"])
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.millions, arguments.rounds, arguments.seeds, arguments.steps = 10, 3, 1, 30
    report = Report("compact_adam", arguments)
    if arguments.only != "loss":
        speed(arguments, report)
    if arguments.only != "speed":
        torch.set_num_threads(min(2, torch.get_num_threads()))
        loss(arguments, report)
    report.save()


if __name__ == "__main__":
    main()
