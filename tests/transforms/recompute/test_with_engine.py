"""Checkpointed regions inside an engine: the same training, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from tests.pool import distributed
from tests.transforms.recompute.models import Stack, batch, plain, stack


def train(stage: int, how: Any, *, frozen: bool) -> list[Tensor]:
    """Losses of four steps, then the weights."""
    model: Stack = stack()
    if frozen:
        model.embed.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    torch.manual_seed(50 + dist.get_rank())
    results = []
    for step in range(4):
        loss = engine(batch(seed=10 * step + dist.get_rank()), how)
        engine.backward(loss)
        engine.step()
        results.append(loss.detach())
    weights = [param.detach().clone() for param in model.parameters()]
    engine.destroy()
    return results + weights


@distributed(world_size=2)
@pytest.mark.parametrize("form", ["checkpoint", "non_reentrant_checkpoint"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_training_is_that_without_checkpointing(stage: int, form: str, frozen: bool) -> None:
    expected = train(stage, plain, frozen=frozen)
    got = train(stage, getattr(deepspeed.transforms.recompute.checkpointing, form), frozen=frozen)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
