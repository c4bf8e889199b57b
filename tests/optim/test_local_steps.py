"""Local steps against ranks that are simulated with torch.optim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.optim.local_steps import DiLoCo
from tests.pool import distributed

ADAM = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
OUTER = {"outer_lr": 0.6, "outer_momentum": 0.8}
EVERY = 3


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(24, 70), nn.Tanh(), nn.Linear(70, 24))


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - x.flip(1)).square().mean()


def start(stage: int = 0, config: dict[str, Any] | None = None, **params: Any) -> Any:
    zero = {"stage": stage, "mics_shard_size": dist.get_world_size() // 2} if stage else {}
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": zero,
        "optimizer": {"type": "DiLoCo", "params": {**ADAM, **OUTER, "sync_every": EVERY, **params}},
        **(config or {}),
    }
    return deepspeed.initialize(model=make_model(), config=settings)[0]


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = loss_of(engine, step, dist.get_rank())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Workers:
    """Models of all workers, each ``size`` ranks, and the weights that they last agreed on."""

    def __init__(self, workers: int, size: int) -> None:
        self.size = size
        self.models = [make_model() for _ in range(workers)]
        self.inner = [torch.optim.AdamW(model.parameters(), **ADAM) for model in self.models]
        self.agreed = make_model()
        self.outer = torch.optim.SGD(self.agreed.parameters(), lr=0.6, momentum=0.8, nesterov=True)

    def gradients(self, step: int) -> None:
        for worker, model in enumerate(self.models):
            model.zero_grad()
            for rank in range(worker * self.size, (worker + 1) * self.size):
                (loss_of(model, step, rank) / self.size).backward()

    def step(self, number: int, warmup: int) -> None:
        self.gradients(number)
        if number == 0:  # an engine sums until it has been asked not to
            self.average_gradients()
        for optimizer in self.inner:
            optimizer.step()
        if (number + 1 - warmup) % EVERY == 0:
            self.agree()

    def average_gradients(self) -> None:
        for same in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack([p.grad for p in same]).mean(0)
            for p in same:
                p.grad = mean.clone()

    @torch.no_grad()
    def agree(self) -> None:
        for agreed, *same in zip(*(m.parameters() for m in (self.agreed, *self.models)), strict=True):
            agreed.grad = agreed - torch.stack(list(same)).mean(0)
        self.outer.step()
        for model in self.models:
            model.load_state_dict(self.agreed.state_dict())


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=[2, 4])
def test_equals_plain_pytorch(world_size: int, stage: int, tmp_path: Path) -> None:
    """On every rank in every step; a run that resumes between two exchanges is exact; nothing travels in between."""
    engine = start(stage)
    size = world_size // 2 if stage else 1
    oracle = Workers(world_size // size, size)
    dense = engine.replica_groups.dense
    link = dense.replicas if stage else dense.all_ranks
    numel = sum(p.numel() for p in engine.module.parameters())
    for step in range(10):
        oracle.step(step, 0)
        before = link.bytes_sent
        train(engine, step, step + 1)
        if step and (step + 1) % EVERY:
            assert link.bytes_sent - before < numel / 4
        model = oracle.models[dist.get_rank() // size]
        for found, value in zip(engine.module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
        if step == 6:
            engine.save_checkpoint(tmp_path)
    assert engine.core.store.optimizer.exchanges == 3
    resumed = start(stage)
    resumed.load_checkpoint(tmp_path)
    train(resumed, 7, 10)
    for found, value in zip(resumed.module.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize("codec", ["none", "int8", "int4", "signs"])
@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@distributed(world_size=2)
def test_codecs(codec: str, config: dict[str, Any]) -> None:
    """Ranks agree at every exchange, with few bytes, and learn about as much."""
    engine = start(0, config, codec=codec, warmup_steps=2, weight_decay=0.0, lr=3e-3)
    losses = train(engine, 0, 2 + 19 * EVERY)
    everyone, numel = engine.replica_groups.all_ranks, sum(p.numel() for p in engine.module.parameters())
    before = everyone.bytes_sent
    losses += train(engine, 2 + 19 * EVERY, 2 + 20 * EVERY)
    limit = {"none": 4.05, "int8": 1.1, "int4": 0.6, "signs": 0.2}[codec]
    assert everyone.bytes_sent - before <= limit * numel + 300
    assert sum(losses[-6:]) < 0.6 * sum(losses[:6])
    for param in engine.module.parameters():
        first = param.detach().clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, param)


@distributed(world_size=2)
def test_another_number_of_ranks(tmp_path: Path) -> None:
    """One rank continues from the mean of the weights of two."""
    engine = start()
    train(engine, 0, 5)
    engine.save_checkpoint(tmp_path)
    expected = [p.detach().clone() for p in engine.module.parameters()]
    for value in expected:
        dist.all_reduce(value)
        value /= 2
    saved: list[Any] = [None, None]
    dist.all_gather_object(saved, engine.core.own_state.saved())
    engine.core.own_state.load(saved, 0, 1)
    for found, value in zip(engine.module.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), value)


def test_arguments_and_alone() -> None:
    params = [torch.zeros(3, requires_grad=True)]
    for bad in ({"sync_every": 0}, {"codec": "pigeon"}, {"outer_momentum": 1.0}, {"outer_lr": 0.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            DiLoCo(params, **bad)  # type: ignore[arg-type]
    model = make_model()
    optimizer = DiLoCo(model.parameters(), lr=1e-2, sync_every=4)
    losses = []
    for step in range(24):
        loss = loss_of(model, step, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and optimizer.exchanges == 6


@distributed(world_size=2)
def test_ranks_of_a_sequence_are_refused_to_a_scripts_own_object() -> None:
    model = make_model()
    config = {"train_micro_batch_size_per_gpu": 8, "sequence_parallel_size": 2}
    with pytest.raises(DeepSpeedConfigError, match="ranks that share a sequence hold copies of all weights"):
        deepspeed.initialize(model=model, config=config, optimizer=DiLoCo(model.parameters()))


@pytest.mark.parametrize(("stage", "group", "fits"), [(0, 0, False), (1, 2, True), (2, 3, False)])
def test_ranks_of_a_sequence_hold_one_copy(stage: int, group: int, fits: bool) -> None:
    zero = {"stage": stage, **({"mics_shard_size": group} if group else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "DiLoCo"},
        "sequence_parallel_size": 2,
        "zero_optimization": zero,
    }
    errors = [str(each) for each in deepspeed.check_config(config, world_size=12).errors]
    assert any("ranks that share a sequence" in each for each in errors) == (not fits), errors
