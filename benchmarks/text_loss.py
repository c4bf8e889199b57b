"""The small model of examples/pretrain_gpt on its text: the losses of one run, for comparisons of optimizers."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from jobs import progress
from report import Report

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "pretrain_gpt")]

ADAM = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def load_text() -> Any:
    """The demo's own text, where it has run; else the same, made anew."""
    import data

    made = ROOT / "examples" / "pretrain_gpt" / "out" / "text"
    if (made / "tokens.npz").exists():
        return data.load(made)
    with tempfile.TemporaryDirectory() as folder:
        data.make(Path(folder))
        return data.load(Path(folder))


def train(
    seed: int,
    steps: int,
    text: Any,
    adam: dict[str, Any],
    config: dict[str, Any],
    disturbance: float = 0.0,
    weights: dict[str, torch.Tensor] | None = None,
) -> tuple[float, float]:
    """Mean training loss of the last tenth of the steps, and the loss on held-out text. ``adam``: further arguments of
    the optimizer; ``config``: further sections; ``disturbance``: relative, of the initial weights; ``weights``: those,
    if not random."""
    import data
    from model import GPT, GPTConfig

    import deepspeed

    shape = GPTConfig(layers=2, heads=4, width=128, context=128)
    torch.manual_seed(seed)
    whole = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {**ADAM, **adam}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": steps, "warmup_num_steps": steps // 15, "cos_min_ratio": 0.1},
        },
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        **config,
    }
    model = GPT(shape)
    if weights is not None:
        model.load_state_dict(weights)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + disturbance * torch.randn_like(param))
    engine = deepspeed.initialize(model=model, config=whole)[0]
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


def pretrained(steps: int, text: Any) -> dict[str, torch.Tensor]:
    """Weights of the same model after ``steps`` of plain AdamW on other parts of the text than `train` begins with."""
    import data
    from model import GPT, GPTConfig

    shape = GPTConfig(layers=2, heads=4, width=128, context=128)
    torch.manual_seed(1234)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAM, "betas": tuple(ADAM["betas"])})
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    batches = data.Batches(text.train, shape.context, global_batch=8, micro_batch=8, rank=0, ranks=1)
    for _, batch in zip(range(steps), batches.from_step(500_000), strict=False):
        optimizer.zero_grad()
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.state_dict()


def compare(
    report: Report,
    seeds: int,
    steps: int,
    name: str,
    others: dict[str, dict[str, Any]],
    shared: dict[str, Any] | None = None,
) -> None:
    """One row per seed and contender: its losses, those of ``name`` (which has only what `train` gives all), and how
    far apart they are. ``others``: ``adam`` and ``config`` of `train`, by name; ``shared``: what else all have.

    Training is chaotic: a run whose initial weights differ by 1e-6 ends elsewhere. The first contender is ``name``
    itself so disturbed, and shows what chance does; means have the standard error of their seeds beside them.
    """
    text = load_text()
    all_have = {"adam": {}, "config": {}, **(shared or {})}
    firsts = [train(seed, steps, text, **all_have) for seed in range(seeds)]
    rows = []
    for other, parts in {f"{name}, other rounding": {"disturbance": 1e-6}, **others}.items():
        apart = []
        for seed, first in enumerate(firsts):
            second = train(seed, steps, text, **{**all_have, **parts})
            apart.append([b / a - 1 for a, b in zip(first, second, strict=True)])
            cells = [f"{value:.4f}" for pair in zip(first, second, strict=True) for value in pair]
            rows.append([f"{other}, seed {seed}", *cells, *(f"{100 * part:+.2f} %" for part in apart[-1])])
            progress(f"{rows[-1]}")
        means = [f"{100 * mean(column):+.2f} %" for column in zip(*apart, strict=True)]
        rows.append([f"{other}, mean", *[""] * 4, *means])
        if seeds > 1:
            errors = [f"{100 * stdev(column) / seeds**0.5:.2f} %" for column in zip(*apart, strict=True)]
            rows.append([f"{other}, standard error", *[""] * 4, *errors])
        report.data[f"loss apart, {other}"] = apart
    header = ["", f"train {name}", "train", f"held out {name}", "held out", "train apart", "held out apart"]
    report.table(f"loss after {steps} steps", header, rows)
