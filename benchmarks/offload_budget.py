"""A model larger than the memory it may use: built, trained, saved, with parameters and state on storage.

One rank, bf16 weights with fp32 masters and AdamW, ZeRO-3 with everything that can be offloaded on storage. The kernel
enforces the budget: RLIMIT_DATA counts every private byte of the process, and is set to what the interpreter and
torch take before the model exists plus ``--budget-gib``. Page cache, which the kernel takes back at will, is not in it.

    python benchmarks/offload_budget.py --model 300M --budget-gib 0.5
    python benchmarks/offload_budget.py --model 3B --budget-gib 2
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import gpt
from report import Report, common_arguments

SIZES = {
    "10M": gpt.SIZES["10M"],
    "300M": gpt.SIZES["350M"],
    "3B": gpt.GPTSize(layers=38, width=2560, heads=32),  # 3.0 B parameters
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Trains within a budget of host memory.")
    parser.add_argument("--model", choices=list(SIZES), default="300M")
    parser.add_argument("--budget-gib", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per step")
    parser.add_argument(
        "--folder", default=None, help="for swap files and the checkpoint; default: temporary files"
    )
    parser.add_argument("--no-save", action="store_true", help="leave the checkpoint out")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.model, arguments.budget_gib = "10M", 0.375
    return arguments


def private_bytes() -> int:
    """Memory of this process that only it can give back: VmData of Linux."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmData:")[1].split()[0])


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def config(folder: str) -> dict[str, object]:
    storage = {"device": "nvme", "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": storage,
            "offload_param": {**storage, "max_in_cpu": 0, "buffer_count": 1},
            "sub_group_size": 1_000_000,  # of small sub-groups the buffers are small
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
        "steps_per_print": 1_000_000,
    }


class Peak:
    """The largest resident private memory seen so far."""

    def __init__(self) -> None:
        self.start = self.most = resident_bytes()

    def look(self, *_: object) -> None:
        self.most = max(self.most, resident_bytes())

    @property
    def gib(self) -> float:
        return (self.most - self.start) / 2**30


def build(size: gpt.GPTSize, context: int, settings: dict[str, object]) -> torch.nn.Module:
    import deepspeed

    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = gpt.GPT(size, context)
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            with deepspeed.zero.GatheredParameters(module.weight, modifier_rank=0):
                torch.nn.init.normal_(module.weight, std=0.02)
    return model


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        # glibc would keep freed blocks of up to 32 MB in its heap, and the limit counts the heap.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    report = Report("offload_budget", arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or torch.get_num_threads())
    import deepspeed

    deepspeed.init_distributed()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run(arguments, report, folder)
    report.save()


def run(arguments: argparse.Namespace, report: Report, folder: str) -> None:
    import deepspeed

    settings = config(folder)
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))  # threads and libraries are there
    budget = private_bytes() + int(arguments.budget_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (budget, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    peak, clock = Peak(), time.perf_counter()
    model = build(SIZES[arguments.model], arguments.tokens, settings)
    count = sum(p.ds_numel for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    built = time.perf_counter() - clock
    for module in model.modules():
        module.register_forward_hook(peak.look)
        module.register_full_backward_hook(peak.look)
    seconds, losses = [], []
    for tokens, targets in gpt.random_batches(1, 1, arguments.tokens, seed=7) * arguments.steps:
        clock = time.perf_counter()
        loss = engine(tokens, targets)
        engine.backward(loss)
        peak.look()
        engine.step()
        peak.look()
        seconds.append(time.perf_counter() - clock)
        losses.append(loss.item())
    clock = time.perf_counter()
    if not arguments.no_save:
        engine.save_checkpoint(folder, tag="budget")
        peak.look()
    saved = time.perf_counter() - clock
    report.table(
        f"{count / 1e6:.0f}M parameters, {arguments.tokens} tokens a step, budget {arguments.budget_gib} GiB",
        ["", ""],
        [
            ["built and initialized, s", f"{built:.1f}"],
            ["step, s", " ".join(f"{s:.1f}" for s in seconds)],
            ["loss", " ".join(f"{loss:.4f}" for loss in losses)],
            ["checkpoint saved, s", "" if arguments.no_save else f"{saved:.1f}"],
            ["peak of private memory, GiB", f"{peak.gib:.3f}"],
            ["model states (2 + 2 + 12 bytes), GiB", f"{16 * count / 2**30:.2f}"],
        ],
    )
    report.data["results"] = {"parameters": count, "peak_gib": peak.gib, "losses": losses, "step_s": seconds}


if __name__ == "__main__":
    main()
