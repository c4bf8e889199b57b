"""Experts under tensor parallelism: copies that divide the tokens, or experts that are split themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm import documented_groups as groups
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from tests.parallel.expert.models import Model, assert_engine_equals_alone, batch, config
from tests.parallel.tensor.test_with_engine import Unit
from tests.pool import distributed

TP = 2


def in_parts(expert: nn.Sequential, unit: Unit) -> nn.Module:
    return nn.Sequential(
        LinearLayer(expert[0], unit.tensor), expert[1], LinearAllreduce(expert[2], unit.tensor)
    )


def begin(stage: int, ep_size: int, split: bool, **model: Any) -> tuple[Any, tuple[int, int]]:
    unit = Unit(TP)
    place = (dist.get_rank() // TP, dist.get_world_size() // TP)
    if split:
        model |= {"enable_expert_tensor_parallelism": True, "change": lambda expert: in_parts(expert, unit)}
    module = Model(ep_size, place=place, **model)
    return deepspeed.initialize(model=module, config=config(stage), mpu=unit)[0], place


@pytest.mark.parametrize(
    ("stage", "ep_size", "split"),
    [(0, 2, False), (1, 1, False), (2, 2, False), (3, 2, False), (0, 2, True), (2, 2, True), (3, 1, True)],
)
@distributed(world_size=4)
def test_equals_one_process(stage: int, ep_size: int, split: bool) -> None:
    engine, place = begin(stage, ep_size, split)
    assert groups._get_expert_model_parallel_world_size() == (TP if split else 1)
    assert_engine_equals_alone(engine, Model(1), place=place)
    engine.destroy()


@distributed(world_size=2)
def test_the_norm_of_gradients_that_stay_apart() -> None:
    """After 1-bit Adam's first updates: copies of experts have gradients of their own tokens, and all of them count."""
    optimizer = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 1}}
    settings = {**config(0, clip=0.0), "optimizer": optimizer}
    engine = deepspeed.initialize(model=Model(1, place=(0, 1)), config=settings, mpu=Unit(TP))[0]
    own: dict[str, torch.Tensor] = {}
    for name, param in engine.module.named_parameters():
        param.register_hook(lambda grad, name=name: own.__setitem__(name, grad.clone()))
    alone = Model(1, place=(0, 1))
    for step in range(2):
        alone.load_state_dict(engine.module.state_dict())
        engine.backward(engine(batch(step, 0)))
        engine.step()
    alone(batch(1, 0)).backward()
    squares = 0.0
    for name, param in alone.named_parameters():
        assert param.grad is not None
        parts = [torch.empty_like(param) for _ in range(TP)]
        dist.all_gather(parts, own[name])
        divided = "deepspeed_experts" in name
        together = torch.stack(parts).sum(0) if divided else parts[0]
        torch.testing.assert_close(together, param.grad, rtol=1e-4, atol=1e-6)
        # a mean over ranks is the sum of what their tokens give
        counting = [TP * part for part in parts] if divided else parts
        squares += sum(float(part.square().sum()) for part in counting) / TP
    assert float(engine.get_global_grad_norm()) == pytest.approx(squares**0.5, rel=1e-5)
    engine.destroy()


@distributed(world_size=4)
def test_a_number_of_tokens_that_does_not_divide_and_a_capacity() -> None:
    """Also a token that no rank keeps, and random numbers drawn by experts of unequal numbers of tokens."""
    settings = {"k": 1, "drop_tokens": True, "capacity_factor": 0.5, "min_capacity": 1}
    engine, _ = begin(2, 2, False, **settings)
    odd = batch(0, 0)[:1, :5]
    loss = engine(odd)
    torch.testing.assert_close(loss, Model(1, **settings)(odd), rtol=1e-5, atol=1e-6)
    engine.backward(loss)
    engine.step()
    engine.destroy()
    engine, place = begin(1, 2, False, **settings)
    # Adam's first step divides each gradient by its size, also those that are little more than rounding.
    assert_engine_equals_alone(engine, Model(1, **settings), place=place, steps=1, atol=1e-5)
    engine.destroy()


@pytest.mark.parametrize(("stage", "split"), [(0, False), (1, False), (3, False), (2, True)])
@distributed(world_size=4)
def test_checkpoints(stage: int, split: bool, tmp_path: Path) -> None:
    engine, place = begin(stage, 2, split)
    for step in range(2):
        engine.backward(engine(batch(step, place[0])))
        engine.step()
    engine.save_checkpoint(tmp_path)
    with torch.no_grad():
        wanted = engine(batch(2, place[0]))
    engine.destroy()
    for later, ep_size in ((stage, 2), (2, 1)):
        second, _ = begin(later, ep_size, split)
        second.load_checkpoint(tmp_path)
        with torch.no_grad():
            torch.testing.assert_close(second(batch(2, place[0])), wanted, rtol=1e-5, atol=1e-6)
        second.destroy()
