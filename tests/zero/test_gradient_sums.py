"""Wire formats of gradients: each alone, and around one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.engine import engine as engine_module
from deepspeed.zero.gradients.sums import GradientSum, InFlight, MakeOut
from tests.pool import distributed
from tests.zero.models import assert_same, config_for

ROWS, WIDTH = 400, 16
NOTHING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


class EightBitSum:
    """A new format, as a stranger would write it: what a rank contributes is rounded to 8 bits per element."""

    def __init__(self, inner: GradientSum) -> None:
        self.inner = inner

    def start(self, local: Tensor, make_out: MakeOut | None, prescale: float, postscale: float) -> InFlight:
        return self.inner.start(rounded(local), make_out, prescale, postscale)


def rounded(values: Tensor) -> Tensor:
    scale = values.abs().max().clamp(min=1e-30) / 127
    return values.div_(scale).round_().mul_(scale)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def ids(step: int) -> Tensor:
    """Each rank looks up some rows that only it uses, and one that all use."""
    return torch.tensor([[0, 7 * step + dist.get_rank() + 1, 300 + step]])


def train(config: dict[str, Any], steps: int = 3) -> tuple[list[float], dict[str, Tensor], Any]:
    engine = deepspeed.initialize(model=make_model(), config=config)[0]
    losses = []
    for step in range(steps):
        loss = engine(ids(step)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = {name: value.clone() for name, value in whole(engine).items()}
    return losses, weights, engine


def whole(engine: Any) -> dict[str, Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def sparse(config: dict[str, Any], travel: bool = True) -> dict[str, Any]:
    return {**config, "sparse_gradients": travel}


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_rows_give_the_bits_of_the_dense_sum(stage: int, precision: str | None) -> None:
    more = {precision: {"enabled": True}} if precision else {}
    config = {**config_for(stage, **(NOTHING if stage == 3 else {})), **more}
    expected_losses, expected, _ = train(config)
    losses, weights, _ = train(sparse(config))
    assert losses == expected_losses
    assert_same(weights, expected)


@pytest.mark.parametrize("size", [1, 2])
@distributed(world_size=4)
def test_rows_within_mics_groups(size: int) -> None:
    """Rows inside a group, shards between groups: what MiCS gives without rows, and fewer bytes in the group."""
    config = config_for(3, mics_shard_size=size, **NOTHING)
    expected_losses, expected, dense = train(config)
    losses, weights, by_rows = train(sparse(config))
    assert losses == expected_losses
    assert_same(weights, expected)
    if size == 2:
        table = 4 * ROWS * WIDTH // 2  # bytes that a rank sends for its share of the sum of the table
        assert sent_inside(by_rows) < sent_inside(dense) - 0.9 * table


def sent_inside(engine: Any) -> int:
    """Bytes within the group in one forward and backward."""
    inside = engine.sharded.replica_groups.dense.shard
    before = inside.bytes_sent
    engine.backward(engine(ids(3)).square().mean())
    return inside.bytes_sent - before


def with_format(plan_of: Callable[..., Any]) -> Callable[..., Any]:
    def planned(*args: Any) -> Any:
        plan = plan_of(*args)
        return replace(plan, gradients=replace(plan.gradients, formats=(EightBitSum,)))

    return planned


@pytest.mark.parametrize("stage, more", [(0, {}), (1, {}), (2, {}), (3, {}), (3, {"mics_shard_size": 1})])
@distributed(world_size=2)
def test_a_new_format(stage: int, more: dict[str, Any]) -> None:
    config = config_for(stage, clip=0.0, **more, **(NOTHING if stage == 3 else {}))
    config["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    _, exact, _ = train(config, steps=1)
    with mock.patch.object(engine_module, "make_plan", with_format(engine_module.make_plan)):
        _, coarse, engine = train(config, steps=1)
    assert isinstance(innermost(engine.core.reducer.buckets[0].over_ranks), EightBitSum)
    gaps = [(exact[name] - coarse[name]).abs().max().item() for name in exact]
    assert 0 < max(gaps) <= 0.51 * largest_gradient() / 127  # the mean of errors of half a step each


def largest_gradient() -> float:
    """Over all elements and ranks, from autograd alone."""
    model = make_model()
    model(ids(0)).square().mean().backward()
    most = torch.stack([p.grad.abs().max() for p in model.parameters() if p.grad is not None]).max()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()


def innermost(found: Any) -> Any:
    while hasattr(found, "inner") and not isinstance(found, EightBitSum):
        found = found.inner
    return found
