"""Channels in the order that the code of a part expects, and splits that compute something else, refused before they
are made."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.parallel.tensor.apply import apply_plan
from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.planning.plan import PlanError, TensorParallelPlan
from deepspeed.parallel.tensor.planning.planner import plan_module
from deepspeed.parallel.tensor.trial import try_split
from tests.parallel.tensor.threads import ThreadGroup, run_ranks

WIDTH, SIZE, BLOCKS = 8, 2, 4


class InBlocks(nn.Module):
    """Attention whose fused projection has, as that of CodeGen, four blocks of (query, value, key) of some heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.fused = nn.Linear(WIDTH, 3 * heads * SIZE)
        self.out = nn.Linear(heads * SIZE, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        blocks = self.fused(x).unflatten(-1, (BLOCKS, -1))
        query, value, key = blocks.split(self.num_heads * SIZE // BLOCKS, -1)
        q, v, k = (each.reshape(*x.shape[:-1], self.num_heads, SIZE) for each in (query, value, key))
        q, v, k = (each.transpose(1, 2) for each in (q, v, k))
        found = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(found.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.mix = InBlocks(heads)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


def plan(model: nn.Module, ranks: int) -> TensorParallelPlan:
    return plan_module(model, ranks, inputs={"x": torch.empty(1, 5, WIDTH, device="meta")})


def by_rank(model: nn.Module, made: TensorParallelPlan, work: Any) -> list[Any]:
    copies = [copy.deepcopy(model) for _ in range(made.ranks)]
    return run_ranks(made.ranks, lambda group: work(copies[group.rank], group))


@pytest.mark.parametrize(("heads", "ranks"), [(8, 2), (16, 2), (16, 4)])
def test_blocks_of_heads_are_dealt_in_the_order_of_the_part(heads: int, ranks: int) -> None:
    model, x = Model(heads), torch.randn(2, 3, WIDTH)
    made = plan(model, ranks)
    assert made.parameters["mix.fused.bias"].cut == made.parameters["mix.fused.weight"].cut

    def work(own: nn.Module, group: ThreadGroup) -> Tensor:
        assert "compared with the whole model" in try_split(made, group)
        apply_plan(own, made, group, lambda *_: None)
        return own(x)

    for found in by_rank(model, made, work):
        torch.testing.assert_close(found, model(x))


def contiguous(made: TensorParallelPlan) -> TensorParallelPlan:
    """Halves of the fused projection, whatever the channels in them are."""
    wrong = {
        name: replace(each, cut=Cut.even(each.cut.dim, each.cut.size, made.ranks))
        for name, each in made.parameters.items()
    }
    return replace(made, parameters=wrong)


def test_a_wrong_split_is_refused_by_name_on_all_ranks_though_the_weights_hide_it() -> None:
    model = Model(8)
    nn.init.zeros_(
        model.mix.out.weight
    )  # as at the start of training: nothing of the attention is seen behind it
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    made = contiguous(plan(model, 2))

    def work(own: nn.Module, group: ThreadGroup) -> str:
        with pytest.raises(PlanError) as error:
            try_split(made, group)
        assert type(own.get_submodule("mix.out")) is nn.Linear
        for name, value in own.state_dict().items():
            assert torch.equal(value, before[name]), name
        return str(error.value)

    for text in by_rank(model, made, work):
        assert "the input of mix.out" in text and "partition_config" in text
    assert torch.equal(torch.get_rng_state(), state)


def test_one_rank_with_another_number_is_enough() -> None:
    made = plan(Model(8), 2)
    change = next(each for each in made.attributes if each.name == "num_heads")
    wrong = replace(made, attributes=(replace(change, values=(4, 8)),))

    def work(own: nn.Module, group: ThreadGroup) -> str:
        with pytest.raises(PlanError) as error:
            try_split(wrong, group)
        return str(error.value)

    first, second = by_rank(Model(8), made, work)
    assert "the input of mix.out (on another rank)" in first and "the input of mix.out (" in second


class Deciding(nn.Module):
    """Looks at values, so that its graph is not known; its author says what to split."""

    def __init__(self, tp_plan: dict[str, str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(WIDTH, 16), "down": nn.Linear(16, WIDTH)}) for _ in range(3)
        )
        self.config = SimpleNamespace(base_model_tp_plan=tp_plan)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            inner = layer["up"](x)
            if inner.mean() > 1e9:
                inner = inner / 2
            x = x + layer["down"](
                (inner - inner.mean(-1, keepdim=True)).relu() if self.mixes else inner.relu()
            )
        return x

    mixes = False


@pytest.mark.parametrize("wrong", ["", "a layer is missing", "channels are mixed"])
def test_an_author_s_plan_is_tried_too(wrong: str) -> None:
    tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    if wrong == "a layer is missing":
        del tp_plan["layers.*.down"]
    model = Deciding(tp_plan)
    model.mixes = wrong == "channels are mixed"
    made = plan(model, 2)
    assert "could not be traced" in made.source

    def work(own: nn.Module, group: ThreadGroup) -> str:
        try:
            return try_split(made, group)
        except PlanError as error:
            return str(error)

    expected = "different results than unsplit" if wrong else "compared with the whole model on a few tokens"
    for said in by_rank(model, made, work):
        assert expected in said, said
        assert "starting with the input of layers.0.down" in said or wrong != "channels are mixed"
