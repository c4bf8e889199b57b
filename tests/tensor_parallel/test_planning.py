"""Plans of small models without names that anybody could know, from their graphs alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
from deepspeed.checkpoint.placement import placement_of
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.runtime.tensor_parallel.planning.plan import PlanError, TensorParallelPlan
from deepspeed.runtime.tensor_parallel.planning.planner import plan_module

WIDTH, SIZE, LENGTH = 12, 4, 5


class Mixer(nn.Module):
    """Grouped attention with one fused projection [queries, keys, values]; names say nothing."""

    def __init__(self, heads: int, shared: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = heads, shared
        self.a = nn.Linear(WIDTH, (heads + 2 * shared) * SIZE)
        self.b = nn.Linear(heads * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads, shared = self.num_heads, self.num_key_value_heads
        made = self.a(x).view(*x.shape[:-1], heads + 2 * shared, SIZE).transpose(1, 2)
        q, k, v = made.split([heads, shared, shared], dim=1)
        k, v = (each.repeat_interleave(heads // shared, dim=1) for each in (k, v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.b((scores @ v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.c = nn.Linear(WIDTH, 2 * hidden)
        self.d = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.c(x).chunk(2, -1)
        return self.d(F.silu(left) * right)


class Model(nn.Module):
    def __init__(self, heads: int = 6, shared: int = 2, hidden: int = 10) -> None:
        super().__init__()
        self.mix, self.gate = Mixer(heads, shared), Gated(hidden)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.first(x))
        return self.head(x + self.gate(self.second(x)))


def plan(model: nn.Module, ranks: int) -> TensorParallelPlan:
    return plan_module(model, ranks, inputs={"x": torch.empty(1, LENGTH, WIDTH, device="meta")})


def test_groups_of_heads_and_fused_matrices_are_cut_in_their_parts() -> None:
    found = plan(Model(), 2)
    cuts = {name: each.cut.parts for name, each in found.parameters.items()}
    assert cuts["mix.a.weight"] == (((0, 12), (24, 28), (32, 36)), ((12, 24), (28, 32), (36, 40)))
    assert cuts["mix.a.bias"] == cuts["mix.a.weight"]
    assert cuts["mix.b.weight"] == (((0, 12),), ((12, 24),))
    assert cuts["gate.c.weight"] == (((0, 5), (10, 15)), ((5, 10), (15, 20)))
    assert cuts["gate.d.weight"] == (((0, 5),), ((5, 10),))
    assert {change.name: change.values for change in found.attributes} == {
        "num_heads": (3, 3),
        "num_key_value_heads": (1, 1),
    }
    assert list(found.whole) == ["head.weight"]
    assert {name: each.kind for name, each in found.parameters.items()}["mix.b.weight"] == "row"


def test_a_head_that_all_queries_share_is_on_every_rank() -> None:
    found = plan(Model(heads=6, shared=1), 3)
    assert found.parameters["mix.a.weight"].cut.parts == (
        ((0, 8), (24, 32)),
        ((8, 16), (24, 32)),
        ((16, 32),),
    )
    assert {change.name: change.values for change in found.attributes} == {
        "num_heads": (2, 2, 2),
        "num_key_value_heads": (1, 1, 1),
    }


def test_heads_that_do_not_divide_are_dealt_unevenly() -> None:
    found = plan(Model(heads=5, shared=5), 3)
    assert found.parameters["mix.b.weight"].cut.extents == (8, 8, 4)


def test_what_cannot_be_shown_to_be_separable_stays_whole() -> None:
    class Normed(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.gate.d(F.layer_norm(self.gate.c(x)[..., :10], (10,))) + self.mix(x)

    found = plan(Normed(), 2)
    assert {"gate.c.weight", "gate.d.weight"} <= found.whole.keys()
    assert "mix.a.weight" in found.parameters


class Adapted(nn.Module):
    """A linear layer with a product of two matrices beside it."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        outputs, inputs = base.weight.shape  # type: ignore[misc]
        self.one = nn.Linear(int(inputs), rank, bias=False)
        self.other = nn.Linear(rank, int(outputs), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.other(F.dropout(self.one(x), 0.1)) * 0.5


def test_adapters_are_cut_with_the_layers_beside_them() -> None:
    model = Model()
    plain = {name: each.cut.parts for name, each in plan(model, 2).parameters.items()}
    model.mix.a, model.mix.b = Adapted(model.mix.a), Adapted(model.mix.b)
    model.gate.c, model.gate.d = Adapted(model.gate.c), Adapted(model.gate.d)
    found = plan(model, 2)
    kinds = {name: (each.kind, each.cut.parts) for name, each in found.parameters.items()}
    for layer in ("mix.a", "gate.c"):
        assert (
            kinds[f"{layer}.base.weight"]
            == kinds[f"{layer}.other.weight"]
            == ("column", plain[f"{layer}.weight"])
        )
        assert f"{layer}.one.weight" not in kinds
    for layer in ("mix.b", "gate.d"):
        assert (
            kinds[f"{layer}.base.weight"] == kinds[f"{layer}.one.weight"] == ("row", plain[f"{layer}.weight"])
        )
        assert f"{layer}.other.weight" not in kinds
    assert list(found.whole) == ["head.weight"]
    assert {each.module: each.values for each in found.attributes if each.name == "num_heads"} == {
        "mix": (3, 3)
    }


def test_a_model_that_cannot_be_followed_is_refused_by_name() -> None:
    class Deciding(Model):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(PlanError, match="Deciding could not be followed"):
        plan(Deciding(), 2)


def test_a_plan_reads_no_weights() -> None:
    model = Model()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    plan(model, 2)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) and placement_of(param).boxes == ()


def test_tp_model_init_says_the_size_and_the_dtype() -> None:
    model = deepspeed.tp_model_init(Model(), tp_size=2, dtype=torch.bfloat16)
    assert next(model.parameters()).dtype is torch.bfloat16
    with pytest.raises(DeepSpeedConfigError, match=r"autotp_size is 4, but .* tp_size=2"):
        deepspeed.tp_model_init(
            Model(), 2, torch.float32, config={"tensor_parallel": {"autotp_size": 4}, "train_batch_size": 1}
        )
