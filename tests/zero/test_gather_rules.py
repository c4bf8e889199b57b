"""Leaf modules, module granularity and the cap on persistent parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.zero.gathering.leaf_modules import (
    fine_grained,
    get_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from deepspeed.zero.partitioning import persistence_threshold
from tests.pool import distributed
from tests.zero.models import config_for

NOTHING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


class Experts(nn.Module):
    """Uses the experts in an order, and a number, that depend on the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.detach().abs().sum(dim=1).argsort()[:2] % 4
        return x + sum(self.experts[i](x) for i in chosen.tolist())


class Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.moe = Experts(width)
        self.outlet = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(self.moe(self.inlet(x)))


def train(zero: dict[str, Any], stage: int = 3) -> tuple[Any, list[float], dict[str, Tensor], list[int]]:
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, config=config_for(stage, **zero))
    losses, gathered = [], []
    if stage == 3:
        buckets = [b for b in engine.sharded.buckets if any(p.ds_shape == (8, 8) for p in b.params)]
        for expert in model.moe.experts:
            expert.register_forward_hook(
                lambda *_: gathered.append(sum(b.status.name == "GATHERED" for b in buckets))
            )
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step + 10 * engine.global_rank))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    leaves = get_z3_leaf_modules(model)
    marked = {name for name, p in model.named_parameters() if z3_leaf_parameter(p)}
    engine.destroy()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    return (leaves, marked), losses, weights, gathered


@pytest.mark.parametrize(
    "rule",
    [
        {"leaf_module": {"classes": ["Experts"]}},
        {"leaf_module": {"classes": [f"{Experts.__module__}.Experts"]}},
        {"leaf_module": {"names": ["moe"]}},
        {"leaf_module": {"name_suffixes": ["oe"]}},
        {"stage3_module_granularity_threshold": 49},
    ],
)
@distributed(world_size=2)
def test_a_leaf_is_gathered_as_a_whole(rule: dict[str, Any]) -> None:
    (leaves, marked), losses, weights, gathered = train({**NOTHING, **rule})
    assert [type(leaf) for leaf in leaves] == [Experts]
    assert marked == {f"moe.experts.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")}
    assert set(gathered) == {4}
    _, expected_losses, expected, one_by_one = train(NOTHING)
    assert set(one_by_one) == {1}
    _, ddp_losses, _, _ = train({}, stage=2)
    assert losses == expected_losses == ddp_losses
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


class Switched(Model):
    """Passes the experts by, keeps their outputs out of the graph, or trains through them."""

    mode = "trained"

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        if self.mode == "trained":
            return self.outlet(self.moe(x))
        if self.mode == "unused":
            return self.outlet(x)
        with torch.no_grad():
            kept = self.moe(x)
        return self.outlet(x + kept)


@pytest.mark.parametrize("frozen", [False, True])
@distributed(world_size=2)
def test_a_leaf_may_get_no_gradient(frozen: bool) -> None:
    """In some steps, or in none: its parameters are frozen."""

    def trained(stage: int, **zero: Any) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        model, losses = Switched(), []
        model.moe.requires_grad_(not frozen)
        engine, *_ = deepspeed.initialize(model=model, config=config_for(stage, **zero))
        assert [type(leaf) for leaf in get_z3_leaf_modules(model)] == ([Experts] if zero else [])
        for step, model.mode in enumerate(("trained", "unused", "without grad", "trained", "unused")):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step + 10 * engine.global_rank))
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses, {name: value.clone() for name, value in model.state_dict().items()}

    losses, weights = trained(3, **NOTHING, leaf_module={"classes": ["Experts"]})
    expected_losses, expected = trained(2)
    assert losses == expected_losses
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def test_fine_grained_by_the_documented_measure() -> None:
    model = Model()  # the experts: 288 elements in 6 modules
    assert fine_grained(model, 48) == []  # 648 elements in 9 modules: 72 each
    assert fine_grained(model.moe, 48) == []
    assert fine_grained(model.moe, 49) == [model.moe]
    assert fine_grained(model, 10_000) == [model]
    in_a_list = nn.ModuleList([model])  # never called itself
    assert fine_grained(in_a_list, 10_000) == [model]


def test_persistence_threshold() -> None:
    numels = [100, 8, 8, 0, 30, 5, 64]
    assert persistence_threshold(numels, 64, 10**9) == 64
    assert persistence_threshold(numels, 64, 115) == 64
    assert persistence_threshold(numels, 64, 114) == 30
    assert persistence_threshold(numels, 64, 51) == 30
    assert persistence_threshold(numels, 64, 20) == 5
    assert persistence_threshold(numels, 64, 4) == 0
    assert persistence_threshold(numels, 0, 10) == 0


@pytest.mark.parametrize(("most", "expected"), [(10**6, 40), (40, 40), (39, 0), (0, 0)])
@distributed(world_size=2)
def test_model_persistence_threshold(most: int, expected: int) -> None:
    """Five biases of 8 elements; all other parameters are larger."""
    torch.manual_seed(0)
    zero = {"stage3_param_persistence_threshold": 8, "stage3_model_persistence_threshold": most}
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, config=config_for(3, **zero))
    assert sum(p.ds_numel for p in model.parameters() if p.ds_persist) == expected
    assert sum(p.numel() for p in model.parameters()) == expected
    engine.destroy()


@distributed(world_size=1)
def test_default_classes_are_passed_over_where_absent() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    engine, *_ = deepspeed.initialize(model=model, config=config_for(3))
    assert get_z3_leaf_modules(model) == []
    assert not z3_leaf_module(model)
    assert not any(z3_leaf_parameter(p) for p in model.parameters())
    engine.destroy()
