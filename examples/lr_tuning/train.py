r"""Tuning the learning rate in two short runs: a range test finds its limits, and 1Cycle trains between them.

    python train.py --plot speed.png
    deepspeed --num_gpus 2 train.py --batch 128

`LRRangeTest` raises the rate until the loss grows. The cycle goes up to a third of that rate, from a tenth of it, while
momentum goes the other way, and the rate then decays. The last run is `WarmupLR` with the lower rate, for comparison.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
import deepspeed.comm as dist
from deepspeed.runtime.dataloader import RepeatingLoader

CONTEXT, VOCABULARY = 16, 256  # bytes


class Text(torch.utils.data.Dataset):
    """Sixteen bytes of the package's source, and the next one."""

    def __init__(self) -> None:
        folder = Path(deepspeed.__file__).parent / "optim"
        data = b"".join(file.read_bytes() for file in sorted(folder.rglob("*.py")))
        self.rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).unfold(0, CONTEXT + 1, 3)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.rows[index].long()
        return row[:-1], row[-1]


class NextByte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(VOCABULARY, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(),
            nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, VOCABULARY),
        )  # fmt: skip

    def forward(self, context: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(context), following)


@dataclass(frozen=True)
class Run:
    rates: list[float]
    losses: list[float]
    """Of each step, over all ranks."""

    def smooth(self, weight: float = 0.9) -> list[float]:
        """Moving average of the losses, without a bias to its start."""
        mean, result = 0.0, []
        for step, loss in enumerate(self.losses, 1):
            mean = weight * mean + (1 - weight) * loss
            result.append(mean / (1 - weight**step))
        return result


def train(scheduler: dict, steps: int, batch: int) -> Run:
    config = {
        "train_batch_size": batch,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "scheduler": scheduler,
    }
    torch.manual_seed(0)
    engine, _, loader, _ = deepspeed.initialize(model=NextByte(), config=config, training_data=Text())
    batches, run = iter(RepeatingLoader(loader)), Run([], [])
    for _ in range(steps):
        context, following = (each.to(engine.device) for each in next(batches))
        loss = engine(context, following)
        engine.backward(loss)
        run.rates.append(engine.get_lr()[0])
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        run.losses.append(mean.item())
        if not math.isfinite(run.losses[-1]) or run.losses[-1] > 4 * min(run.losses):
            break  # diverged
    return run


def range_test(steps: int) -> dict:
    """From 1e-4 up to 0.05 in ``steps`` steps."""
    params = {
        "lr_range_test_min_lr": 1e-4,
        "lr_range_test_step_size": max(1, steps // 50),
        "lr_range_test_step_rate": 0.0,
        "lr_range_test_staircase": False,
    }
    # The rate after k steps is min_lr x (1 + k / step_size x step_rate).
    params["lr_range_test_step_rate"] = (0.05 / 1e-4 - 1) * params["lr_range_test_step_size"] / steps
    return {"type": "LRRangeTest", "params": params}


def found(run: Run) -> float:
    """A third of the rate at which the smooth loss is lowest: beyond that it grows."""
    smooth = run.smooth()
    return run.rates[smooth.index(min(smooth))] / 3


def one_cycle(rate: float, steps: int) -> dict:
    half = int(0.4 * steps)
    return {
        "type": "OneCycle",
        "params": {
            "cycle_min_lr": rate / 10,
            "cycle_max_lr": rate,
            "cycle_first_step_size": half,
            "cycle_second_step_size": half,
            "cycle_momentum": True,
            "cycle_min_mom": 0.85,
            "cycle_max_mom": 0.95,
            "decay_step_size": max(1, (steps - 2 * half) // 10),
            "decay_lr_rate": 0.5,
        },
    }


def warm_up(rate: float) -> dict:
    return {"type": "WarmupLR", "params": {"warmup_max_lr": rate / 10, "warmup_num_steps": 20}}


def draw(runs: dict[str, Run], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    (name, tested), *others = runs.items()
    left.semilogx(tested.rates, tested.smooth(), label=name)
    left.set(xlabel="learning rate", ylabel="loss (moving average)")
    for name, run in others:
        right.plot(run.smooth(), label=name)
    right.set(xlabel="step")
    for axes in (left, right):
        axes.legend()
    pyplot.tight_layout()
    pyplot.savefig(file)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--test_steps", type=int, default=150, help="of the range test")
    parser.add_argument("--plot", type=Path, help="a picture of all three runs (needs matplotlib)")
    parser.add_argument("--local_rank", type=int, default=-1)
    options = parser.parse_args(argv)
    deepspeed.init_distributed(auto_mpi_discovery=False)

    tested = train(range_test(options.test_steps), options.test_steps, options.batch)
    rate = found(tested)
    runs = {"range test": tested}
    runs["1Cycle"] = train(one_cycle(rate, options.steps), options.steps, options.batch)
    runs["WarmupLR"] = train(warm_up(rate), options.steps, options.batch)
    if dist.get_rank() == 0:
        share = len(tested.losses) / (2 * options.steps + len(tested.losses))
        print(
            f"range test: {len(tested.losses)} steps ({share:.0%} of all), lr {rate / 10:.2g} to {rate:.2g}"
        )
        for name, run in list(runs.items())[1:]:
            print(f"{name}: loss {run.smooth()[-1]:.3f} after {len(run.losses)} steps")
        if options.plot:
            draw(runs, options.plot)
    dist.barrier()
    return runs


if __name__ == "__main__":
    main()
