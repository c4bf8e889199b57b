"""A mixture of experts against the dense model with as many FLOPs per token: the demo's GPT on the demo's text.

    python examples/moe_gpt/compare.py
    python examples/moe_gpt/compare.py --steps 40 --seeds 0                        # the short form
    python examples/moe_gpt/compare.py --picture_only                              # of the measurements there are

Model and text are those of examples/pretrain_gpt. In the mixture, every block has --experts experts instead of one
perceptron, of which each token uses --topk, each as many times narrower: the products of a token are the same, only the
router's are added. Both see the same batches. Writes measurements of each run, and the losses as a picture, to
examples/moe_gpt/out. `deepspeed --num_gpus 2 examples/moe_gpt/compare.py` spreads the experts over two ranks.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "pretrain_gpt"))

from data import Batches, Text, load, make  # noqa: E402
from model import GPT, Block, GPTConfig  # noqa: E402

import deepspeed  # noqa: E402
import deepspeed.comm as dist  # noqa: E402
from deepspeed.moe.layer import MoE  # noqa: E402

RUNS = ("dense", "mixture")
COLUMNS: tuple[str, ...] = ("step", "validation_loss", "seconds")
VALIDATION_WINDOWS = 64


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--topk", type=int, default=2, help="experts per token")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balancing loss")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, of all ranks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--evaluate_every", type=int, default=100, metavar="STEPS")
    parser.add_argument(
        "--text", type=Path, default=HERE.parent / "pretrain_gpt/out/text", help="made if missing"
    )
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--picture_only", action="store_true", help="train nothing")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    return parser.parse_args(argv)


def place() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Expert(nn.Module):
    """The perceptron of a block, ``share`` times narrower."""

    def __init__(self, width: int, share: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width // share, bias=False)
        self.down = nn.Linear(4 * width // share, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class MixtureBlock(Block):
    """``l_aux`` is the balancing loss of the last forward."""

    l_aux: Tensor

    def __init__(self, config: GPTConfig, experts: int, k: int, ranks: int) -> None:
        super().__init__(config)
        del self.up, self.down
        self.mixture = MoE(
            config.width,
            Expert(config.width, k),
            experts,
            ranks,
            k=k,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,  # the same routes in training and in evaluation
        )

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        output, self.l_aux, _ = self.mixture(self.mlp_norm(x))
        return x + output


class MixtureGPT(GPT):
    """In training, the balancing losses are part of the loss."""

    def __init__(self, config: GPTConfig, experts: int, k: int, balance: float, ranks: int) -> None:
        super().__init__(config)
        self.balance = balance
        self.blocks = nn.ModuleList(MixtureBlock(config, experts, k, ranks) for _ in range(config.layers))
        torch.manual_seed(torch.initial_seed() + place()[0])  # each rank draws experts of its own
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if not isinstance(module, MixtureBlock):
            return super()._initialise(module)
        ends = [each.down for each in module.mixture.modules() if isinstance(each, Expert)]
        for layer in (module.attention.out, *ends):
            nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        result = super().forward(ids, targets)
        if targets is None or not self.training:
            return result
        return result + self.balance * torch.stack([block.l_aux for block in self.blocks]).sum()  # type: ignore[misc]


def model_of(options: argparse.Namespace, run: str) -> GPT:
    sizes = GPTConfig(
        context=options.context, layers=options.layers, heads=options.heads, width=options.width
    )
    if run == "dense":
        return GPT(sizes)
    ranks = math.gcd(options.experts, place()[1])
    return MixtureGPT(sizes, options.experts, options.topk, options.balance, ranks)


def evaluate(engine: Any, windows: Batches, count: int) -> float:
    """Mean loss in nats per token. Every rank evaluates the same."""
    engine.eval()
    with torch.no_grad():
        pairs = [windows.read(part.numpy()) for part in torch.arange(count).split(8)]
        losses = [engine(*(each.to(engine.device) for each in pair)) for pair in pairs]
    engine.train()
    return float(torch.stack(losses).mean())


def train(options: argparse.Namespace, run: str, seed: int, text: Text) -> list[dict[str, float]]:
    """A row at every evaluation."""
    torch.manual_seed(seed)
    rank, ranks = place()
    config = {
        "train_batch_size": options.batch,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": options.lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": options.steps, "warmup_num_steps": max(2, options.steps // 20)},
        },
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model_of(options, run), config=config)
    places = {
        "global_batch": options.batch,
        "micro_batch": options.batch // ranks,
        "rank": rank,
        "ranks": ranks,
    }
    batches = Batches(text.train, options.context, **places).from_step(seed * options.steps)
    held_out = Batches(text.validation, options.context, **places)
    count = min(VALIDATION_WINDOWS, held_out.windows)
    rows, seconds = [], 0.0
    for step in range(1, options.steps + 1):
        pair = [each.to(engine.device) for each in next(batches)]
        began = time.perf_counter()
        engine.backward(engine(*pair))
        engine.step()
        seconds += time.perf_counter() - began
        if step % options.evaluate_every == 0 or step == options.steps:
            rows.append(
                {"step": step, "validation_loss": evaluate(engine, held_out, count), "seconds": seconds}
            )
            if rank == 0:
                loss = rows[-1]["validation_loss"]
                print(
                    f"seed {seed}, {run}: step {step}, {seconds:.0f} s, validation loss {loss:.4f}",
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


def read(folder: Path) -> dict[int, dict[str, list[dict[str, float]]]]:
    """The measurements of every seed of which there are both runs."""
    found: dict[int, dict[str, list[dict[str, float]]]] = {}
    for path in sorted(folder.glob("dense_*.csv")):
        seed = int(path.stem.partition("_")[2])
        files = {run: folder / f"{run}_{seed}.csv" for run in RUNS}
        if all(file.exists() for file in files.values()):
            found[seed] = {
                run: [
                    {key: float(value) for key, value in row.items()} for row in csv.DictReader(file.open())
                ]
                for run, file in files.items()
            }
    return found


def step_of(rows: list[dict[str, float]], loss: float) -> float | None:
    """The step at which the validation loss was as low as ``loss`` for the first time; on a line between two
    evaluations."""
    for before, after in zip(rows, rows[1:], strict=False):
        high, low = before["validation_loss"], after["validation_loss"]
        if low <= loss < high:
            return before["step"] + (high - loss) / (high - low) * (after["step"] - before["step"])
    return None


def factor(runs: dict[str, list[dict[str, float]]]) -> float | None:
    """How many times fewer steps the mixture takes to the dense model's last loss."""
    last = runs["dense"][-1]
    step = step_of(runs["mixture"], last["validation_loss"])
    return None if step is None else last["step"] / step


def plot(seeds: dict[int, dict[str, list[dict[str, float]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=110, layout="constrained")
    for runs in seeds.values():
        for run, colour in zip(RUNS, ("#555555", "#c8553d"), strict=True):
            points = [(row["step"], row["validation_loss"]) for row in runs[run]]
            axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=2.5, linewidth=1.1)
    for run, colour in (("dense", "#555555"), ("mixture of experts", "#c8553d")):
        axes.plot([], [], color=colour, label=f"{run}, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}")
    axes.set(xlabel="optimizer step", ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def report(seeds: dict[int, dict[str, list[dict[str, float]]]]) -> None:
    for seed, runs in seeds.items():
        dense, mixture = (runs[run][-1] for run in RUNS)
        times = factor(runs)
        print(
            f"seed {seed}: validation loss at step {dense['step']:.0f} dense {dense['validation_loss']:.4f}, mixture "
            f"{mixture['validation_loss']:.4f}; "
            + (
                "the mixture does not get there"
                if times is None
                else f"the same loss in {times:.2f} x fewer steps"
            )
            + f"; {mixture['seconds'] / dense['seconds']:.2f} x the time per step"
        )


def main(argv: Sequence[str] | None = None) -> dict[int, dict[str, list[dict[str, float]]]]:
    options = parse_arguments(argv)
    if not options.picture_only:
        deepspeed.init_distributed()
        if dist.get_rank() == 0 and not (options.text / "tokens.npz").exists():
            make(options.text)
        dist.barrier()
        text = load(options.text)
        for seed in options.seeds:
            for run in RUNS:
                rows = train(options, run, seed, text)
                if dist.get_rank() == 0:
                    write(rows, options.out / f"{run}_{seed}.csv")
        if dist.get_rank() != 0:
            return {}
    seeds = read(options.out)
    report(seeds)
    plot(seeds, options.out / "loss.png")
    print(f"picture: {options.out / 'loss.png'}")
    return seeds


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
