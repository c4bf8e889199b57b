"""AdamW with moments in 8 bits and bfloat16 masters, against moments and masters in fp32: speed and loss.

Speed: one step on host memory with gradients in bf16. fp32 masters, fp32 moments and the bf16 weights that are made
from them take 26 bytes of traffic and 18 of memory per parameter; bf16 weights alone with 8-bit moments 10 and 6.

Loss: the small model of examples/pretrain_gpt on its text, bf16, with both optimizers from several seeds, and how far
apart the means over the last tenth of the steps and the validation losses are.

    python benchmarks/compact_adam.py --save cpu
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from report import Report, common_arguments

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "pretrain_gpt")]

SMALL = {"state_bits": 8, "stochastic_rounding": True}
ADAM = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


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


def train(seed: int, steps: int, small: bool, text: Any) -> tuple[float, float]:
    """Mean training loss of the last tenth of the steps, and the loss on held-out text."""
    import data
    from model import GPT, GPTConfig

    import deepspeed

    shape = GPTConfig(layers=2, heads=4, width=128, context=128)
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {**ADAM, **(SMALL if small else {})}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": steps, "warmup_num_steps": steps // 15, "cos_min_ratio": 0.1},
        },
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": small},
    }
    engine = deepspeed.initialize(model=GPT(shape), config=config)[0]
    sizes: dict[str, int] = {"global_batch": 8, "micro_batch": 8, "rank": 0, "ranks": 1}
    batches = data.Batches(text.train, shape.context, **sizes).from_step(seed * 1000)
    losses = []
    for _ in range(steps):
        loss = engine(*next(batches))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    held_out = data.Batches(text.validation, shape.context, **sizes).from_step(0)
    engine.eval()
    with torch.no_grad():
        validation = mean(engine(*next(held_out)).item() for _ in range(40))
    engine.destroy()
    return mean(losses[-steps // 10 :]), validation


def loss(arguments: argparse.Namespace, report: Report) -> None:
    import data

    with tempfile.TemporaryDirectory() as folder:
        data.make(Path(folder))
        text = data.load(Path(folder))
    rows, apart = [], []
    for seed in range(arguments.seeds):
        wide, small = (train(seed, arguments.steps, kind, text) for kind in (False, True))
        apart.append([s / w - 1 for s, w in zip(small, wide, strict=True)])
        cells = [f"{value:.4f}" for pair in zip(wide, small, strict=True) for value in pair]
        rows.append([str(seed), *cells, *(f"{100 * part:+.2f} %" for part in apart[-1])])
    means = [mean(column) for column in zip(*apart, strict=True)]
    rows.append(["mean", *[""] * 4, *(f"{100 * part:+.2f} %" for part in means)])
    report.data["loss apart"] = apart
    header = ["seed", "train fp32", "train 8 bits", "held out fp32", "held out 8 bits", "train", "held out"]
    report.table(f"loss after {arguments.steps} steps", header, rows)


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--millions", type=int, default=100, help="parameters of one step, in millions")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
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
