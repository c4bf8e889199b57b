"""Uses of pipelines in scripts besides training: weights tied by a property, attributes that they read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import deepspeed
from deepspeed.engine.pipeline.engine import PipelineEngine
from deepspeed.parallel.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from tests.pool import distributed

WORDS, WIDTH, RATE = 10, 6, 0.5


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    @property
    def shared_weight(self) -> Tensor:
        return self.table.weight

    def forward(self, numbers: Tensor) -> Tensor:
        return self.table(numbers)


class Scores(nn.Module):
    """Of another class, and its weight has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WORDS, bias=False)

    @property
    def shared_weight(self) -> Tensor:
        return self.projection.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x)


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(5)
    while True:
        numbers = torch.randint(WORDS, (2, 4), generator=source)
        yield numbers, numbers.roll(1, 1)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tied(stages: int = 2, **config: Any) -> PipelineEngine:
    module = PipelineModule(
        [
            TiedLayerSpec("words", Words, tied_weight_attr="shared_weight"),
            LayerSpec(nn.Linear, WIDTH, WIDTH),
            nn.Tanh(),
            TiedLayerSpec("words", Scores, tied_weight_attr="shared_weight"),
        ],
        num_stages=stages,
        partition_method="uniform",
        loss_fn=loss_of,
    )
    for param in module.parameters():
        param.data.copy_(values(*param.shape))
    engine, *_ = deepspeed.initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            **config,
        },
    )
    assert isinstance(engine, PipelineEngine)
    return engine


def plain_losses(steps: int) -> list[float]:
    """The oracle: one weight that is used twice, in one process."""
    table = values(WORDS, WIDTH).requires_grad_()
    weight, bias = values(WIDTH, WIDTH).requires_grad_(), values(WIDTH).requires_grad_()
    optimizer, data, losses = torch.optim.SGD([table, weight, bias], lr=RATE), batches(), []
    for _ in range(steps):
        parts = []
        for _ in range(2):
            numbers, labels = next(data)
            hidden = functional.linear(functional.embedding(numbers, table), weight, bias).tanh()
            parts.append(loss_of(hidden @ table.T, labels) / 2)
        torch.stack(parts).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    return losses


@distributed(world_size=2)
def test_a_tie_may_be_named_by_a_property(tmp_path: Path) -> None:
    engine, data, expected = tied(), batches(), plain_losses(4)
    losses = [engine.train_batch(data).item() for _ in range(2)]
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    again = tied()
    again.load_checkpoint(str(tmp_path))
    losses += [again.train_batch(data).item() for _ in range(2)]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    again.destroy()


class BySamples:
    """A schedule whose ``step`` needs an argument, as Megatron-LM's does."""

    def __init__(self) -> None:
        self.samples = 0

    def step(self, increment: int) -> None:
        self.samples += increment


@distributed(world_size=2)
def test_a_schedule_that_counts_samples_is_told_them() -> None:
    engine, data, schedule = tied(), batches(), BySamples()
    engine.lr_scheduler = schedule
    engine.train_batch(data)
    engine.set_train_batch_size(8)
    engine.train_batch(data)
    assert schedule.samples == 4 + 8
    engine.destroy()


@distributed(world_size=2)
def test_attributes_that_scripts_read() -> None:
    engine, data = tied(), batches()
    assert (engine.micro_batches, engine.micro_batch_size) == (2, 2)
    assert (engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel) == (
        True,
        False,
        False,
    )
    assert (engine.prev_stage, engine.next_stage) == (engine.stage_id - 1, engine.stage_id + 1)
    assert engine.agg_train_loss is None
    assert torch.equal(engine.train_batch(data), engine.agg_train_loss)
    engine.micro_batches = 3
    assert engine.gradient_accumulation_steps() == 3 and engine.train_batch_size() == 6
    assert len(engine.eval_batch(data, reduce_output=None)) == 3
    engine.destroy()
