"""Progressive layer dropping: the schedule, the arguments of a model, and which blocks are skipped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import deepspeed
from deepspeed.transforms.progressive_layer_drop import ProgressiveLayerDrop
from tests.pool import distributed

WIDTH, LAYERS, STEPS = 8, 4, 6
THETA, GAMMA = 0.2, 2.0


def theta_at(step: int) -> float:
    return (1 - THETA) * math.exp(-GAMMA * step) + THETA


def kept(step: int) -> list[tuple[bool, float]]:
    """Of each block in a step of one micro-batch: whether it runs, and its probability."""
    draws = torch.rand(LAYERS, generator=torch.Generator().manual_seed(step)).tolist()
    chances = [1 - i / LAYERS * (1 - theta_at(step)) for i in range(1, LAYERS + 1)]
    return [(draw < chance, chance) for draw, chance in zip(draws, chances, strict=True)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.linear(self.norm(hidden_states)).relu()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean() + x.mean()


class Oracle(Stack):
    """Skips layers itself, as ``kept`` says."""

    step = 0

    def forward(self, x: Tensor) -> Tensor:
        for block, (runs, chance) in zip(self.blocks, kept(self.step), strict=True):
            if runs:
                x = x + (block(x) - x) / chance
        return self.norm(x).square().mean() + x.mean()


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.told: list[Any] = []

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        self.told.append((kwargs.get("progressive_layer_drop"), kwargs.get("pld_theta")))
        return self.linear(x).mean()


def config(stage: int = 0, theta: float = THETA) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "progressive_layer_drop": {"enabled": True, "theta": theta, "gamma": GAMMA},
    }


def data(step: int, rank: int = 0) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def test_the_schedule() -> None:
    drop = ProgressiveLayerDrop(theta=0.5, gamma=0.001)
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    for step in (0, 1, 500, 100_000):
        drop.update_state(step)
        assert drop.get_theta() == 0.5 * math.exp(-0.001 * step) + 0.5


@distributed(world_size=1)
def test_a_model_that_takes_theta_is_told_it() -> None:
    model = Told()
    engine, *_ = deepspeed.initialize(model=model, config=config())
    assert engine.pld_enabled() and engine.pld_theta() == THETA
    for step in range(3):
        engine.backward(engine(data(step)))
        engine.step()
    engine.eval()(data(0))
    assert model.told == [*((True, theta_at(step)) for step in range(3)), (None, None)]
    assert engine.get_pld_theta() == engine.progressive_layer_drop.get_theta() == theta_at(2)


def alone(ranks: int) -> list[float]:
    torch.manual_seed(3)
    model = Oracle()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        model.step = step
        optimizer.zero_grad()
        loss = torch.stack([model(data(step, rank)) for rank in range(ranks)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def run(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(data(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def start(stage: int) -> Any:
    torch.manual_seed(3)
    return deepspeed.initialize(model=Stack(), config=config(stage))[0]


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_blocks_are_skipped_as_the_paper_says(stage: int, tmp_path: Path) -> None:
    assert sum(not runs for step in range(STEPS) for runs, _ in kept(step)) > 3
    engine = start(stage)
    expected = alone(2)
    torch.testing.assert_close(run(engine, 0, 4), expected[:4], rtol=1e-5, atol=1e-6)
    engine.save_checkpoint(str(tmp_path))
    resumed = start(stage)
    resumed.load_checkpoint(str(tmp_path))
    torch.testing.assert_close(run(resumed, 4, STEPS), expected[4:], rtol=1e-5, atol=1e-6)


@distributed(world_size=1)
def test_flops_fall_as_the_schedule_says() -> None:
    engine = start(0)

    def flops(steps: range) -> int:
        with FlopCounterMode(display=False) as counter:
            for step in steps:
                engine.backward(engine(data(step)))
                engine.step()
        return counter.get_total_flops()

    block = 3 * 2 * 2 * WIDTH * WIDTH  # forward, and the gradients of input and weight
    assert flops(range(1)) == block * LAYERS  # nothing is dropped in the first step
    runs = [[runs for runs, _ in kept(step)] for step in range(1, 40)]
    assert sum(map(sum, runs)) < 0.75 * 39 * LAYERS
    assert flops(range(1, 40)) == block * sum(map(sum, runs))


@distributed(world_size=1)
def test_evaluation_skips_nothing() -> None:
    engine = start(0)
    run(engine, 0, 3)
    with torch.no_grad():
        value = engine.eval()(data(0))
        x = data(0)
        for block in engine.module.blocks:
            x = x + block.linear(block.norm(x)).relu()
    torch.testing.assert_close(value, engine.module.norm(x).square().mean() + x.mean())


@distributed(world_size=1)
def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(RuntimeError, match="pld_theta"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=config())
