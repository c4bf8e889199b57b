"""Tiled compute inside an engine: every stage trains as without tiles, and each gradient arrives once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from tests.parallel.sequence.tiled_models import Model, assert_close, batch, model
from tests.pool import distributed

BEYOND_BUDGET = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


def start(each: Model, stage: int, **sections: Any) -> Any:
    zero = {"stage": stage} | (BEYOND_BUDGET if stage == 3 else {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": zero,
        **sections,
    }
    return deepspeed.initialize(model=each, config=config)[0]


def train(engine: Any, steps: int = 2) -> dict[str, Tensor]:
    losses = []
    for step in range(2 * steps):
        loss = engine(*batch(seed=10 * step + dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    return {"losses": torch.stack(losses), **weights}


@distributed(world_size=2)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_that_without_tiles(stage: int, checkpointed: bool) -> None:
    results = []
    for shards in (1, 3):
        each = model().tile(shards)
        if checkpointed:
            each.run = deepspeed.transforms.recompute.checkpointing.checkpoint
        engine = start(each, stage)
        results.append(train(engine))
        engine.destroy()
    assert_close(results[1], results[0])


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_gradient_arrives_once(stage: int) -> None:
    engine = start(model().tile(3), stage)
    reducer, arrivals = engine.core.reducer, Counter[int]()
    inner = reducer.ready

    def ready(index: int, param: Tensor) -> None:
        arrivals[index] += 1
        inner(index, param)

    reducer.ready = ready
    engine.backward(engine(*batch(seed=dist.get_rank())))
    assert arrivals == dict.fromkeys(range(len(reducer.params)), 1)
    engine.destroy()


@distributed(world_size=2)
def test_weights_are_gathered_once_for_all_tiles() -> None:
    """Beyond the budget: blocks and head once in forward and once in backward, whatever the number of tiles."""
    seen = []
    for shards in (1, 2, 5):
        engine = start(model(depth=3).tile(shards), 3)
        gatherer, gathers = engine.sharded.gatherer, Counter[int]()
        inner = gatherer.gather

        def gather(index: int, phase: Any, inner: Any = inner, gathers: Any = gathers) -> None:
            gathers[index] += 1
            inner(index, phase)

        gatherer.gather = gather
        engine.backward(engine(*batch(seed=dist.get_rank())))
        seen.append(gathers)
        assert not any(engine.sharded.transitions.holders)
        engine.destroy()
    assert seen[1] == seen[2] and all(seen[1][b] <= max(2, seen[0][b]) for b in seen[1])


@distributed(world_size=2)
def test_evaluation_and_bf16() -> None:
    engine = start(model().tile(3), 3, bf16={"enabled": True})
    plain = model().bfloat16()
    engine.eval()
    with torch.no_grad():
        got, expected = engine(*batch()), plain(*batch())
    assert got.item() == pytest.approx(expected.item(), rel=1e-2)
    engine.train()
    assert torch.isfinite(train(engine)["losses"]).all()
    engine.destroy()
