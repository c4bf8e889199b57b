r"""One technique of the config at a time: prepare the trained model, train it on, clean it, and compare.

    python examples/compression/from_config.py
    python examples/compression/from_config.py --only row_pruning channel_pruning

`techniques.json` has a section for each run. Weights, rows, heads and layers are taken from the classifier of text
(`task.py`), channels from the blocks of a small ResNet that counts rings. What `redundancy_clean` returns is an
ordinary module: pruned rows, heads, channels and layers are gone from its shapes, pruned weights are zeros.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from task import Classifier as TextClassifier
from task import Sizes, Snippets, Table, saved, settings, train
from torch import Tensor, nn
from torch.nn import functional

import deepspeed
from deepspeed.compression.compress import init_compression, redundancy_clean

TECHNIQUES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("techniques.json").read_text())


class Rings:
    """Pictures [batch, 1, 16, 16] of one to four rings around the middle, with noise; their number is the class."""

    def train(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        classes = torch.randint(4, (size,), generator=generator)
        axis = torch.arange(16) - 7.5
        distance = (axis[:, None] ** 2 + axis**2).sqrt()
        period = 8.0 / (classes + 1)
        rings = torch.cos(distance / period[:, None, None] * 2 * torch.pi)
        return (rings + 1.5 * torch.randn(size, 16, 16, generator=generator))[:, None], classes

    def test(self, size: int) -> tuple[Tensor, Tensor]:
        return self.train(size, torch.Generator().manual_seed(1))


@dataclass
class Output:
    logits: Tensor


class Residual(nn.Module):
    """A block of a ResNet; what is pruned are the channels between its two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn1(self.conv1(x)).relu()
        return (x + self.bn2(self.conv2(inner))).relu()


class RingClassifier(nn.Module):
    """A ResNet of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(Residual(16), Residual(16))
        self.classifier = nn.Linear(16, 4)

    def forward(self, pictures: Tensor) -> Output:
        return Output(self.classifier(self.blocks(self.stem(pictures)).mean(dim=(2, 3))))


def from_labels(output: Any, inputs: Tensor, classes: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits, classes)


@torch.no_grad()
def accuracy(model: nn.Module, data: Any) -> float:
    model.eval()
    inputs, classes = data.test(1000)
    return (model(inputs).logits.argmax(dim=-1) == classes).float().mean().item()


def trained(model: nn.Module, data: Any, steps: int, options: argparse.Namespace, **config: Any) -> nn.Module:
    """``model`` after ``steps`` steps; with a section for compression it is clean."""
    teacher = copy.deepcopy(model)
    whole = settings(steps, options.lr, **config)
    if config:
        model = init_compression(model, whole, teacher_model=teacher)
    engine, *_ = deepspeed.initialize(model=model, config=whole)
    train(engine, data, steps, options.batch, from_labels)
    if config:
        return redundancy_clean(engine, whole, packed=True).module
    engine.destroy()
    return model


def main(arguments: list[str] | None = None) -> dict[str, Table]:
    """A table for each of the two models: the trained one, then each technique's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(TECHNIQUES), default=list(TECHNIQUES))
    parser.add_argument("--steps", type=int, default=150, help="of the model that is compressed")
    parser.add_argument("--more-steps", type=int, default=100, help="of each compressed one")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "ds_compression"))
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    deepspeed.init_distributed(auto_mpi_discovery=False)

    sizes = Sizes(hidden=options.hidden, inner=4 * options.hidden, layers=options.layers)
    tasks = {"text": (TextClassifier(sizes), Snippets(sizes.length)), "pictures": (RingClassifier(), Rings())}
    tables: dict[str, Table] = {}
    for task, (model, data) in tasks.items():
        chosen = [name for name in options.only if (name == "channel_pruning") == (task == "pictures")]
        if not chosen:
            continue
        torch.manual_seed(0)
        trained(model, data, options.steps, options)
        table = tables[task] = Table()
        table.add(f"{task}, whole", accuracy(model, data), saved(model, options.output / f"{task}.pt"))
        for name in chosen:
            config = {"compression_training": copy.deepcopy(TECHNIQUES[name])}
            more = options.more_steps * (3 if task == "pictures" else 1)  # which are cheap
            clean = trained(copy.deepcopy(model), data, more, options, **config)
            table.add(name, accuracy(clean, data), saved(clean, options.output / f"{name}.pt"))
    return tables


if __name__ == "__main__":
    main()
