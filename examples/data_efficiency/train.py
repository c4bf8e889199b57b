"""Less data, less time: the demo's GPT with a curriculum of sequence lengths and random-LTD, against without.

    python examples/data_efficiency/train.py
    python examples/data_efficiency/train.py --steps 60 --runs plain both          # the short form
    python examples/data_efficiency/train.py --picture_only                        # of the measurements there are

Model and text are those of examples/pretrain_gpt. Every run has the same optimizer and as many floating-point
operations as --steps steps of the plain one, so that cheaper steps are more steps (--same_steps: as many steps).
Operations are counted, once for every pair of lengths that occurs. Writes measurements of each run, and the loss by
operations and by steps as a picture, to examples/data_efficiency/out.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "pretrain_gpt"))

from data import Batches, Text, load, make  # noqa: E402
from model import GPT, Block, GPTConfig  # noqa: E402

import deepspeed  # noqa: E402
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler  # noqa: E402
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd  # noqa: E402

RUNS = ("plain", "curriculum", "random-LTD", "both")
COLUMNS: tuple[str, ...] = ("step", "tokens", "kept", "operations", "validation_loss", "seconds")
VALIDATION_WINDOWS = 32


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--same_steps", action="store_true", help="the same steps, not the same operations")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--evaluate_every", type=int, default=20, metavar="STEPS")
    parser.add_argument(
        "--text", type=Path, default=HERE.parent / "pretrain_gpt/out/text", help="made if missing"
    )
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--picture_only", action="store_true", help="train nothing")
    return parser.parse_args(argv)


def settings(options: argparse.Namespace, run: str, steps: int) -> dict[str, Any]:
    """Both techniques begin with a quarter of the context, and have reached it after 60 and 90 % of the steps."""
    config: dict[str, Any] = {
        "train_batch_size": options.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": steps, "warmup_num_steps": max(2, steps // 20)},
        },
    }
    if run in ("curriculum", "both"):
        config["curriculum_learning"] = {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": options.context // 4,
            "max_difficulty": options.context,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": steps * 6 // 10, "difficulty_step": 8},
        }
    if run in ("random-LTD", "both"):
        config["data_efficiency"] = {
            "enabled": True,
            "data_routing": {
                "enabled": True,
                "random_ltd": {
                    "enabled": True,
                    "total_layer_num": options.layers,
                    "random_ltd_layer_num": options.layers - 2,
                    "random_ltd_layer_id": list(
                        range(1, options.layers - 1)
                    ),  # all but the first and the last
                    "model_mask_name": None,
                    "model_type": "decoder",
                    "hidden_state_order": "batch_seq_dim",
                    "random_ltd_schedule": {
                        "min_value": options.context // 4,
                        "max_value": options.context,
                        "schedule_type": "fixed_linear",
                        "schedule_config": {"require_steps": steps * 9 // 10, "seq_per_step": 8},
                    },
                },
            },
        }
    return config


def steps_of(options: argparse.Namespace, run: str) -> int:
    """As many as cost what ``options.steps`` plain ones cost, by the products of the model's matrices."""
    if options.same_steps:
        return options.steps
    whole, width = options.context, options.width

    def cost(tokens: float, kept: float) -> float:
        dropping = options.layers - 2 if run in ("random-LTD", "both") else 0
        layers = ((options.layers - dropping, tokens), (dropping, min(tokens, kept)))
        return GPTConfig.vocabulary * width * tokens + sum(
            count * (12 * width**2 * length + 2 * width * length**2) for count, length in layers
        )

    def grown(share: float, end: float) -> float:
        return whole * min(1.0, 0.25 + 0.75 * share / end)

    shares = [(i + 0.5) / 100 for i in range(100)]
    curriculum = run in ("curriculum", "both")
    costs = [cost(grown(share, 0.6) if curriculum else whole, grown(share, 0.9)) for share in shares]
    return round(options.steps * cost(whole, whole) * len(costs) / sum(costs))


class Operations:
    """Floating-point operations of training so far, in forward and backward. A step with lengths that were counted
    before is not counted again."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.total = 0
        self._by_lengths: dict[tuple[int, int], int] = {}

    def step(self, ids: torch.Tensor, targets: torch.Tensor, lengths: tuple[int, int]) -> None:
        profiler = FlopsProfiler(self.engine.module) if lengths not in self._by_lengths else None
        if profiler is not None:
            profiler.start_profile()
        self.engine.backward(self.engine(ids, targets))
        if profiler is not None:
            profiler.stop_profile()
            counted = int(profiler.get_total_flops()) + int(profiler.get_total_backward_flops())
            self._by_lengths[lengths] = counted
            profiler.end_profile()
        self.total += self._by_lengths[lengths]
        self.engine.step()


def lengths_of(engine: Any, context: int) -> tuple[int, int]:
    """Tokens of a sequence, and tokens that the layers with random-LTD keep of them, in the next step."""
    tokens = kept = context
    if engine.curriculum_enabled_legacy():
        tokens = engine.curriculum_scheduler_legacy.get_difficulty(engine.global_steps + 1)
    if engine.random_ltd_enabled():
        kept = engine.random_ltd_scheduler.get_value(engine.global_steps)
    return tokens, min(tokens, kept)


def evaluate(engine: Any, windows: Batches, count: int) -> float:
    """Mean loss on whole sequences, in nats per token."""
    engine.eval()
    with torch.no_grad():
        pairs = [windows.read(part.numpy()) for part in torch.arange(count).split(8)]
        losses = [engine(*(each.to(engine.device) for each in pair)) for pair in pairs]
    engine.train()
    return float(torch.stack(losses).mean())


def train(options: argparse.Namespace, run: str, text: Text) -> list[dict[str, float]]:
    """A row at every evaluation."""
    torch.manual_seed(0)
    sizes = GPTConfig(
        context=options.context, layers=options.layers, heads=options.heads, width=options.width
    )
    steps = steps_of(options, run)
    engine, *_ = deepspeed.initialize(model=GPT(sizes), config=settings(options, run, steps))
    if engine.random_ltd_enabled():
        convert_to_random_ltd(engine, Block)
    ranks = {"global_batch": options.batch, "micro_batch": options.batch, "rank": 0, "ranks": 1}
    batches = Batches(text.train, options.context, **ranks).from_step(0)
    held_out = Batches(text.validation, options.context, **ranks)
    count = min(VALIDATION_WINDOWS, held_out.windows)
    operations, rows, seconds = Operations(engine), [], 0.0
    for step in range(1, steps + 1):
        tokens, kept = lengths_of(engine, options.context)
        ids, targets = (each.to(engine.device) for each in next(batches))
        began = time.perf_counter()
        operations.step(ids, targets, (tokens, kept))
        seconds += time.perf_counter() - began
        if step % options.evaluate_every == 0 or step == steps:
            values = (step, tokens, kept, operations.total, evaluate(engine, held_out, count), seconds)
            rows.append(dict(zip(COLUMNS, map(float, values), strict=True)))
            print(
                f"{run}: step {step}, {tokens} tokens, {kept} in the middle layers, "
                f"{operations.total / 1e12:.2f} Tflop, validation loss {rows[-1]['validation_loss']:.3f}",
                flush=True,
            )
    engine.destroy()
    return rows


def write(rows: list[dict[str, float]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def read(folder: Path) -> dict[str, list[dict[str, float]]]:
    """The measurements of every run that has been made."""
    found = {}
    for run in RUNS:
        path = folder / f"{run}.csv"
        if path.exists():
            with open(path, newline="") as file:
                found[run] = [
                    {key: float(value) for key, value in row.items()} for row in csv.DictReader(file)
                ]
    return found


def at_loss(rows: list[dict[str, float]], loss: float) -> float | None:
    """Operations after which the validation loss was as low as ``loss`` for the first time; on a line between two
    evaluations."""
    for before, after in zip(rows, rows[1:], strict=False):
        high, low = before["validation_loss"], after["validation_loss"]
        if low <= loss < high:
            share = (high - loss) / (high - low)
            return before["operations"] + share * (after["operations"] - before["operations"])
    return None


def plot(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), dpi=110, layout="constrained", sharey=True)
    scales = (("operations", "floating-point operations (10$^{12}$)", 1e-12), ("step", "optimizer step", 1.0))
    for axes, (column, label, scale) in zip(panels, scales, strict=True):
        for run, rows in runs.items():
            x = [row[column] * scale for row in rows]
            axes.plot(
                x, [row["validation_loss"] for row in rows], "o-", markersize=3, linewidth=1.3, label=run
            )
        axes.set(xlabel=label)
        axes.grid(alpha=0.25)
    panels[0].set(ylabel="validation loss (nats per token)")
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, list[dict[str, float]]]:
    options = parse_arguments(argv)
    if not options.picture_only:
        if not (options.text / "tokens.npz").exists():
            make(options.text)
        text = load(options.text)
        for run in options.runs:
            write(train(options, run, text), options.out / f"{run}.csv")
    runs = read(options.out)
    for run, rows in runs.items():
        last, line = rows[-1], ""
        if run != "plain" and "plain" in runs:
            whole = runs["plain"][-1]
            line = f", {last['operations'] / whole['operations']:.2f} of the operations"
            needed = at_loss(runs["plain"], last["validation_loss"])
            if needed is not None:
                line += f"; without it that loss takes {needed / last['operations']:.2f} x as many"
        print(
            f"{run}: {last['operations'] / 1e12:.2f} Tflop, {last['seconds']:.0f} s, validation loss "
            f"{last['validation_loss']:.3f}{line}"
        )
    plot(runs, options.out / "loss.png")
    print(f"picture: {options.out / 'loss.png'}")
    return runs


if __name__ == "__main__":
    main()
