"""Adapters on a frozen base in 8 bits, against one in fp32: bytes and loss.

The small model of examples/pretrain_gpt is trained on its text by plain PyTorch and frozen; then adapters
(deepspeed/transforms/lora) of its matrices are trained on more of it, once on the weights as they are and once on
weights of 8 bits in groups of 512. Shown are the bytes of the base per number, the mean training loss of the last tenth
of the steps and the loss on held-out text, from several seeds.

    python benchmarks/quantized_base.py --save text
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from report import Report, common_arguments
from text_loss import ADAM, load_text

TARGETS = ["qkv", "out", "up", "down"]
SIZES: dict[str, int] = {"global_batch": 8, "micro_batch": 8, "rank": 0, "ranks": 1}


def batches(tokens: Any, context: int, first: int) -> Any:
    import data

    return data.Batches(tokens, context, **SIZES).from_step(first)


def pretrained(seed: int, steps: int, text: Any) -> dict[str, Tensor]:
    from model import GPT, GPTConfig

    shape = GPTConfig(layers=2, heads=4, width=128, context=128)
    torch.manual_seed(seed)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAM, "betas": tuple(ADAM["betas"])})
    source = batches(text.train, shape.context, seed * 1000)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*next(source)).backward()
        optimizer.step()
    return model.state_dict()


def tuned(seed: int, bits: int | None, weights: dict[str, Tensor], steps: int, text: Any) -> dict[str, float]:
    """Bytes of the frozen matrices per number, and both losses."""
    from model import GPT, GPTConfig

    import deepspeed
    from deepspeed.linear import Init, LoRAConfig, QuantizationConfig, init_lora

    shape = GPTConfig(layers=2, heads=4, width=128, context=128)
    torch.manual_seed(seed)
    lora = LoRAConfig(lora_r=8, lora_alpha=16.0, target_mods=TARGETS)
    with Init(lora, None if bits is None else QuantizationConfig(q_bits=bits, group_size=512)):
        model = GPT(shape)
    model.load_state_dict(weights)
    init_lora(model)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 1},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    source = batches(text.train, shape.context, 500_000 + seed * 1000)
    losses = []
    for _ in range(steps):
        loss = engine(*next(source))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    held_out = batches(text.validation, shape.context, 0)
    engine.eval()
    with torch.no_grad():
        validation = mean(engine(*next(held_out)).item() for _ in range(40))
    engine.destroy()
    frozen = [module.weight for path, module in model.named_modules() if path.split(".")[-1] in TARGETS]
    numbers = sum(w.numel() for name, w in weights.items() if name.split(".")[-2] in TARGETS)
    taken = sum(weight.nbytes for weight in frozen if isinstance(weight, nn.Parameter))
    return {"bytes": taken / numbers, "train": mean(losses[-steps // 10 :]), "held out": validation}


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--base-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200)
    arguments: argparse.Namespace = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.base_steps, arguments.steps = 1, 10, 10
    torch.set_num_threads(min(2, torch.get_num_threads()))
    report, text = Report("quantized_base", arguments), load_text()
    rows, apart = [], []
    for seed in range(arguments.seeds):
        weights = pretrained(seed, arguments.base_steps, text)
        wide, narrow = (tuned(seed, bits, weights, arguments.steps, text) for bits in (None, 8))
        apart.append([narrow[part] / wide[part] - 1 for part in ("train", "held out")])
        cells = [f"{found[part]:.4f}" for part in ("train", "held out") for found in (wide, narrow)]
        parts = [f"{100 * part:+.2f} %" for part in apart[-1]]
        rows.append([f"seed {seed}", f"{wide['bytes']:.3f}", f"{narrow['bytes']:.3f}", *cells, *parts])
        report.data[f"seed {seed}"] = {"fp32": wide, "8 bits": narrow}
    means = [f"{100 * mean(column):+.2f} %" for column in zip(*apart, strict=True)]
    rows.append(["mean", *[""] * 6, *means])
    header = [
        "",
        "base fp32",
        "8 bits",
        "train fp32",
        "8 bits",
        "held out fp32",
        "8 bits",
        "train apart",
        "held out apart",
    ]
    report.table(
        f"adapters after {arguments.steps} steps; bytes of the base per number, and loss", header, rows
    )
    report.save()


if __name__ == "__main__":
    main()
