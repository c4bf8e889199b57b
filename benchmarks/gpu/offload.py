"""Optimizer offload on one CUDA GPU: host-link bytes and device peak, counted, and speed beside the run in memory.

NOT YET RUN: written where there was no GPU.

    python benchmarks/gpu/offload.py --model 7B --save h200

Goals: 4 bytes per parameter and step over the host link (bf16: gradients down, weights up); device peak = 16-bit
weights + one gradient bucket + activations, within 3 %; a 7B model at >= 70 % of its speed in memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import gpt
from report import Report, common_arguments

SIZES = {
    "50M": gpt.SIZES["50M"],
    "350M": gpt.SIZES["350M"],
    "7B": gpt.GPTSize(layers=32, width=4096, heads=32),
}
BUCKET = 100_000_000  # elements


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Optimizer offload on one CUDA GPU (not yet run).")
    parser.add_argument("--model", default="7B", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.model, arguments.batch, arguments.steps = "50M", 1, 2
    return arguments


def train(arguments: argparse.Namespace, offload: bool) -> dict[str, Any]:
    """Seconds per step, bytes over the host link per parameter and step, and the device's peak."""
    import deepspeed

    torch.manual_seed(1)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = gpt.GPT(SIZES[arguments.model], arguments.context)
        torch.set_default_dtype(torch.float32)
    count = sum(p.numel() for p in model.parameters())
    zero: dict[str, Any] = {"stage": 2, "reduce_bucket_size": BUCKET}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    batches = gpt.random_batches(2, arguments.batch, arguments.context, seed=3)
    batches = [(x.cuda(), y.cuda()) for x, y in batches]
    seconds = []
    for step in range(arguments.steps + 1):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        clock = time.perf_counter()
        engine.backward(engine(*batches[step % 2]))
        engine.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - clock)
    tier, copies = engine.core.store.tier, engine.core.reducer.buckets[0].host
    moved = (tier.bytes_to_device + copies.bytes) if offload else 0
    peak = torch.cuda.max_memory_allocated()
    engine.destroy()
    return {
        "parameters": count,
        "seconds": sorted(seconds[1:])[len(seconds[1:]) // 2],
        "link_bytes": moved / count / len(seconds),
        "peak_gib": peak / 2**30,
        "least_gib": 2 * (count + BUCKET) / 2**30,
    }


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    os.environ["DS_ACCELERATOR"] = "cuda"
    report = Report("gpu_offload", arguments)
    rows = {"in memory": train(arguments, offload=False), "offloaded": train(arguments, offload=True)}
    fastest = rows["in memory"]["seconds"]
    report.table(
        f"{arguments.model} GPT, bf16, batch {arguments.batch} x {arguments.context}",
        ["", "s/step", "of the speed in memory", "link bytes/parameter", "peak GiB", "weights + bucket GiB"],
        [
            [
                name,
                f"{row['seconds']:.3f}",
                f"{fastest / row['seconds']:.2f}",
                f"{row['link_bytes']:.2f}",
                f"{row['peak_gib']:.2f}",
                f"{row['least_gib']:.2f}",
            ]
            for name, row in rows.items()
        ],
    )
    report.data["rows"] = rows
    report.save()


if __name__ == "__main__":
    main()
