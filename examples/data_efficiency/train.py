"""Less data, less time: the demo's GPT with a curriculum of sequence lengths and random-LTD, against without.

    python examples/data_efficiency/train.py
    python examples/data_efficiency/train.py --runs plain both --seeds 1 2 3       # how much differs by chance
    python examples/data_efficiency/train.py --steps 60 --runs plain both          # the short form

Model and text are those of examples/pretrain_gpt. The plain run has --steps steps; the others have the same optimizer
and --budget of its floating-point operations, so that cheaper steps are more steps (--same_steps: as many steps).
Operations are counted, once for every pair of lengths that occurs. Writes measurements of each run, and the loss by
operations and by steps as a picture, to examples/data_efficiency/out. A run that is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler  # noqa: E402
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd  # noqa: E402
from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler  # noqa: E402

RUNS = ("plain", "curriculum", "random-LTD", "both")
COLOURS = ("#555555", "#4a7fb0", "#d9a441", "#c8553d")
VALIDATION_WINDOWS = 64
# Where each technique begins, as a share of the context, and when it has reached all of it, as a share of the steps.
CURRICULUM = (0.25, 0.9)
RANDOM_LTD = (0.125, 1.0)

Row = dict[str, float]
Measured = dict[str, dict[int, list[Row]]]
"""Rows by run and seed."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="of weights, batches and dropped tokens"
    )
    parser.add_argument("--steps", type=int, default=300, help="of the plain run")
    parser.add_argument("--budget", type=float, default=0.65, help="operations of the others, as a share")
    parser.add_argument("--same_steps", action="store_true", help="the same steps instead of a budget")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--evaluate_every", type=int, default=50, metavar="STEPS")
    parser.add_argument(
        "--text", type=Path, default=HERE.parent / "pretrain_gpt/out/text", help="made if missing"
    )
    parser.add_argument("--out", type=Path, default=HERE / "out")
    return parser.parse_args(argv)


def settings(options: argparse.Namespace, run: str, steps: int, seed: int = 0) -> dict[str, Any]:
    """The learning rate follows what has been computed, in units of a plain step: `train` tells the schedule."""
    config: dict[str, Any] = {
        "train_batch_size": options.batch,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": options.lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
    }
    if run in ("curriculum", "both"):
        begin, end = CURRICULUM
        config["curriculum_learning"] = {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": int(begin * options.context),
            "max_difficulty": options.context,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": int(end * steps), "difficulty_step": 8},
        }
    if run in ("random-LTD", "both"):
        begin, end = RANDOM_LTD
        middle = list(range(1, options.layers - 1))  # all layers but the first and the last
        config["data_efficiency"] = {
            "enabled": True,
            "seed": seed,
            "data_routing": {
                "enabled": True,
                "random_ltd": {
                    "enabled": True,
                    "total_layer_num": options.layers,
                    "random_ltd_layer_num": len(middle),
                    "random_ltd_layer_id": middle,
                    "model_mask_name": None,
                    "model_type": "decoder",
                    "hidden_state_order": "batch_seq_dim",
                    "random_ltd_schedule": {
                        "min_value": int(begin * options.context),
                        "max_value": options.context,
                        "schedule_type": "fixed_linear",
                        "schedule_config": {"require_steps": int(end * steps), "seq_per_step": 8},
                    },
                },
            },
        }
    total = round(sum(cost(options, *each) for each in lengths(options, config, steps)))
    config["scheduler"] = {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": total, "warmup_num_steps": max(2, total // 20)},
    }
    return config


def lengths(options: argparse.Namespace, config: dict[str, Any], steps: int) -> list[tuple[int, int]]:
    """Tokens of a sequence, and tokens that the layers with random-LTD keep of them, in every step."""
    tokens, kept = [options.context] * steps, [options.context] * steps
    if "curriculum_learning" in config:
        growing = CurriculumScheduler(config["curriculum_learning"])
        tokens = [growing.get_difficulty(step + 1) for step in range(steps)]
    if "data_efficiency" in config:
        section = config["data_efficiency"]["data_routing"]["random_ltd"]
        keeping = RandomLTDScheduler({**section, "global_batch_size": options.batch})
        kept = [keeping.get_value(step) for step in range(steps)]
    return [(count, min(count, of_them)) for count, of_them in zip(tokens, kept, strict=True)]


def cost(options: argparse.Namespace, tokens: int, kept: int) -> float:
    """Of a step with these lengths, in units of a plain one: the products of the model's matrices."""
    width, middle = options.width, options.layers - 2

    def products(tokens: int, kept: int) -> int:
        layers = ((options.layers - middle, tokens), (middle, kept))
        return GPTConfig.vocabulary * width * tokens + sum(
            count * (12 * width**2 * length + 2 * width * length**2) for count, length in layers
        )

    return products(tokens, kept) / products(options.context, options.context)


def steps_of(options: argparse.Namespace, run: str) -> int:
    """As many as the budget allows."""
    if run == "plain" or options.same_steps:
        return options.steps
    config = settings(options, run, options.steps)
    costs = [cost(options, *each) for each in lengths(options, config, options.steps)]
    return int(options.budget * options.steps * len(costs) / sum(costs))


class Operations:
    """Floating-point operations of training so far, in forward and backward. A step with lengths that were counted
    before is not counted again."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.total = 0
        self._by_lengths: dict[tuple[int, int], int] = {}

    def step(
        self, ids: torch.Tensor, targets: torch.Tensor, lengths: tuple[int, int], position: float
    ) -> None:
        """``position`` is that of the learning rate's schedule after this step."""
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
        self.engine.step(lr_kwargs={"last_batch_iteration": position})


def evaluate(engine: Any, windows: Batches) -> float:
    """Mean loss on whole sequences from all over the text, in nats per token."""
    count = min(VALIDATION_WINDOWS, windows.windows)
    chosen = torch.arange(count) * windows.windows // count
    engine.eval()
    with torch.no_grad():
        pairs = [windows.read(part.numpy()) for part in chosen.split(8)]
        losses = [engine(*(each.to(engine.device) for each in pair)) for pair in pairs]
    engine.train()
    return float(torch.stack(losses).mean())


def train(options: argparse.Namespace, run: str, text: Text, seed: int = 0) -> list[Row]:
    """A row at every evaluation."""
    torch.manual_seed(seed)
    sizes = GPTConfig(
        context=options.context, layers=options.layers, heads=options.heads, width=options.width
    )
    steps = steps_of(options, run)
    config = settings(options, run, steps, seed)
    engine, *_ = deepspeed.initialize(model=GPT(sizes), config=config)
    if engine.random_ltd_enabled():
        convert_to_random_ltd(engine, Block)
    ranks = {"global_batch": options.batch, "micro_batch": options.batch, "rank": 0, "ranks": 1}
    batches = Batches(text.train, options.context, **ranks)
    # Every epoch has an order of its own.
    ordered = batches.from_step(seed * (batches.windows // options.batch))
    held_out = Batches(text.validation, options.context, **ranks)
    operations, rows, done, seconds = Operations(engine), [], 0.0, 0.0
    for step, (tokens, kept) in enumerate(lengths(options, config, steps), 1):
        ids, targets = (each.to(engine.device) for each in next(ordered))
        began = time.perf_counter()
        done += cost(options, tokens, kept)
        operations.step(ids, targets, (tokens, kept), done)
        seconds += time.perf_counter() - began
        if step % options.evaluate_every == 0 or step == steps:
            loss = evaluate(engine, held_out)
            rows.append(
                {
                    "step": step,
                    "tokens": tokens,
                    "kept": kept,
                    "operations": operations.total,
                    "validation_loss": loss,
                    "seconds": seconds,
                }
            )
            print(
                f"seed {seed}, {run}: step {step}, {tokens} tokens, {kept} in the middle layers, "
                f"{operations.total / 1e12:.2f} Tflop, {seconds:.0f} s, validation loss {loss:.4f}",
                flush=True,
            )
    engine.destroy()
    return rows


def measure(options: argparse.Namespace, run: str, text: Text, seed: int) -> list[Row]:
    """The rows of a run: from its file if what was asked for then is asked for now."""
    steps = steps_of(options, run)
    sizes = [options.layers, options.heads, options.width, options.context, options.evaluate_every]
    asked = {"steps": steps, "sizes": sizes, "config": settings(options, run, steps, seed)}
    path = options.out / f"{run}_{seed}.json"
    if path.exists():
        found = json.loads(path.read_text())
        if found["asked"] == asked:
            return found["rows"]
    rows = train(options, run, text, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"asked": asked, "rows": rows}, indent=1))
    return rows


def plot(measured: Measured, path: Path) -> None:
    """A line of each run; with several seeds their mean, and from the lowest to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), dpi=110, layout="constrained", sharey=True)
    scales = (("operations", "floating-point operations (10$^{12}$)", 1e-12), ("step", "optimizer step", 1.0))
    for axes, (column, label, scale) in zip(panels, scales, strict=True):
        for run, seeds in measured.items():
            colour = COLOURS[RUNS.index(run)]
            points = list(zip(*seeds.values(), strict=True))  # at every evaluation, a row of each seed
            x = [rows[0][column] * scale for rows in points]
            losses = [[row["validation_loss"] for row in rows] for rows in points]
            axes.fill_between(
                x, [min(each) for each in losses], [max(each) for each in losses], color=colour, alpha=0.2
            )
            mean = [statistics.fmean(each) for each in losses]
            axes.plot(x, mean, "o-", color=colour, markersize=3, linewidth=1.3, label=run)
        if "plain" in measured:
            goal = statistics.fmean(rows[-1]["validation_loss"] for rows in measured["plain"].values())
            axes.axhline(goal, color=COLOURS[0], linewidth=0.8, linestyle=":")
        axes.set(xlabel=label)
        axes.grid(alpha=0.25)
    panels[0].set(ylabel="validation loss (nats per token)")
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def report(measured: Measured) -> None:
    """The end of every run, and against the plain one of its seed."""
    for run, seeds in measured.items():
        for seed, rows in seeds.items():
            last, line = rows[-1], ""
            if run != "plain" and seed in measured.get("plain", {}):
                whole = measured["plain"][seed][-1]
                line = (
                    f", {last['validation_loss'] - whole['validation_loss']:+.4f} against plain with "
                    f"{last['operations'] / whole['operations']:.3f} of its operations"
                )
            print(
                f"seed {seed}, {run}: {last['step']} steps, {last['operations'] / 1e12:.3f} Tflop, "
                f"{last['seconds']:.0f} s, validation loss {last['validation_loss']:.4f}{line}"
            )


def main(argv: Sequence[str] | None = None) -> Measured:
    options = parse_arguments(argv)
    if not (options.text / "tokens.npz").exists():
        make(options.text)
    text = load(options.text)
    measured: Measured = {run: {} for run in options.runs}
    for seed in options.seeds:
        for run in options.runs:
            measured[run][seed] = measure(options, run, text, seed)
    report(measured)
    plot(measured, options.out / "loss.png")
    print(f"picture: {options.out / 'loss.png'}")
    return measured


if __name__ == "__main__":
    main()
