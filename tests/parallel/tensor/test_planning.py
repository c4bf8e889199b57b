"""Plans of small models without names that anybody could know, from their graphs alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
from deepspeed.checkpoint.placement import placement_of
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.parallel import TPTrainingConfig
from deepspeed.parallel.tensor.apply import apply_plan
from deepspeed.parallel.tensor.planning import planner
from deepspeed.parallel.tensor.planning.plan import PlanError, TensorParallelPlan
from deepspeed.parallel.tensor.planning.planner import plan_module
from deepspeed.parallel.tensor.planning.rules import rules_of
from tests.parallel.tensor.threads import ThreadGroup, run_ranks

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


def plan(model: nn.Module, ranks: int, **section: Any) -> TensorParallelPlan:
    inputs = {"x": torch.empty(1, LENGTH, WIDTH, device="meta")}
    rules = rules_of(model, TPTrainingConfig(**section)) if section else None
    return plan_module(model, ranks, inputs=inputs, rules=rules)


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
    """A linear layer plus a product of two matrices."""

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

    with pytest.raises(PlanError, match="Deciding could not be traced"):
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
    model = deepspeed.tp_model_init(Model(), 2, torch.float32, tp_group=object())
    with pytest.raises(DeepSpeedConfigError, match="tp_model_init provided tp_group"):
        deepspeed.initialize(model=model, config={"train_batch_size": 1}, mpu=object())


# ------------------------------------------------------------------------------------ rules


def by(*specs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"partition_config": {"layer_specs": list(specs), **more}}


def compared(model: nn.Module, found: TensorParallelPlan) -> None:
    """The result and the gradients of the input and of whole weights are those of one rank."""
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))

    def run(module: nn.Module) -> tuple[Tensor, Tensor]:
        inputs = x.clone().requires_grad_()
        output = module(inputs)
        output.square().sum().backward()
        assert inputs.grad is not None
        return output.detach(), inputs.grad

    copies = [copy.deepcopy(model) for _ in range(found.ranks)]

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        apply_plan(copies[group.rank], found, group, lambda *_: None)
        return run(copies[group.rank])

    expected = run(model)
    for each in run_ranks(found.ranks, work):
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-5)


def test_rules_choose_what_is_split() -> None:
    model = Model()
    some = [
        {"patterns": [r"gate\.c\.weight"], "shape": [2, -1]},
        {"patterns": [r"gate\.d\.weight"], "partition_type": "row"},
        {"patterns": ["nothing"]},
    ]
    found = plan(model, 2, **by(*some, use_default_specs=False))
    assert {name.split(".")[0] for name in found.parameters} == {"gate"}
    assert found.whole["mix.a.weight"] == "no rule matches it"
    every = plan(model, 2, **by(*some, {"patterns": ["mix"], "partition_type": "skip"}))
    assert every.parameters == found.parameters and every.whole["mix.a.weight"] == "excluded by your rules"
    assert plan(model, 2, **by(*some)).parameters.keys() > found.parameters.keys()
    assert rules_of(model, TPTrainingConfig(**by(*some))).unmatched == ("nothing",)


def test_whole_outputs_of_a_layer_that_cannot_be_split_otherwise() -> None:
    model = Model()
    found = plan(model, 2, **by({"patterns": [r"head\.weight"], "gather_output": True}))
    assert found.parameters["head.weight"].gather and not found.whole
    compared(model, found)


@pytest.mark.parametrize(
    ("section", "match"),
    [
        (by({"patterns": [r"mix\.b\.weight"]}), r"mix\.b\.weight to be 'column', but .* it is 'row'"),
        (by({"patterns": [r"head\.weight"]}), r"head\.weight to be 'column', but .* stays whole, because"),
        (by({"patterns": [r"mix\.a\.weight"], "shape": [3, -1]}), r"\(3, -1\) does not match mix\.a\.weight"),
        (by({"patterns": [r"mix\.a\.weight"], "shape": [4, -1]}), "into parts of .10, 10, 10, 10."),
        (
            by({"patterns": [r"first\.weight"], "partition_type": "skip", "grad_allreduce": True}),
            "every rank already has the full gradient",
        ),
        ({"injection_policy_tuple": ("a",)}, r"mix\.a\.weight to be 'row', but"),
        ({"injection_policy_tuple": ("z",)}, "the model has no layer named 'z'"),
        (
            {"injection_policy_tuple": ("b",), **by({"patterns": [r"mix\.b"]})},
            "is 'row' by .* and 'column' by",
        ),
        ({"preset_model": "bloom"}, "preset_model='bloom' names no parameter of Model"),
        (by({"patterns": [r"mix"]}, strict_mode=True), r"no rule of layer_specs matches gate\.c\.weight"),
    ],
)
def test_a_rule_that_the_model_contradicts_is_refused_by_name(section: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        plan(Model(), 2, **section)


def test_outputs_that_are_summed_can_be_named() -> None:
    model = Model()
    assert plan(model, 2, injection_policy_tuple=("mix.b", "d")).parameters == plan(model, 2).parameters


class Deciding(nn.Module):
    """Its graph cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gated(8), Gated(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if x.sum() > -1e9 else -x
        return x


@pytest.mark.parametrize(
    "section",
    [
        by(
            {"patterns": [r".*\.c\.weight"], "shape": [[8, 8], -1], "partition_dim": 0},
            {"patterns": [r".*\.d\.weight"], "partition_type": "row"},
        ),
        {
            "injection_policy_tuple": ("d",),
            **by({"patterns": [r".*\.c\.weight"], "shape": [2, -1]}),
        },
    ],
)
def test_rules_are_the_plan_of_a_model_that_cannot_be_followed(section: dict[str, Any]) -> None:
    model = Deciding()
    found = plan(model, 2, **section)
    assert found.parameters["layers.0.c.weight"].cut.parts == (((0, 4), (8, 12)), ((4, 8), (12, 16)))
    assert "could not be traced" in found.source
    compared(model, found)
    with pytest.raises(PlanError, match="not a multiple of 3 ranks"):
        plan(model, 3, **section)


def test_the_author_s_plan_serves_a_model_that_cannot_be_followed() -> None:
    class Planned(Deciding):
        tp_plan = {"layers.*.d": "rowwise", "layers.*.c": "packed_colwise"}

    with pytest.raises(PlanError, match="could not be traced"):
        plan(Deciding(), 2)
    found = plan(Planned(), 2)
    assert {name: each.kind for name, each in found.parameters.items()} == {
        "layers.0.d.weight": "row",
        "layers.1.d.weight": "row",
    }


def test_a_plan_in_the_config_serves_a_module_of_no_known_class() -> None:
    class Carrying(Deciding):
        config = SimpleNamespace(base_model_tp_plan={"*.c": "colwise", "layers.*.d": "rowwise"})

    found = plan(Carrying(), 2)
    assert {name: each.kind for name, each in found.parameters.items() if name.endswith("weight")} == {
        "layers.0.c.weight": "column",
        "layers.0.d.weight": "row",
        "layers.1.c.weight": "column",
        "layers.1.d.weight": "row",
    }
    Carrying.config.num_attention_heads = 3
    with pytest.raises(PlanError, match="could not be traced"):
        plan(Carrying(), 2)


def test_a_weight_that_is_also_used_whole_stays_whole() -> None:
    class Regularized(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.gate.d.weight.square().sum() + self.mix.a.bias.mean()

    model = Regularized()
    found = plan(model, 2)
    assert not found.parameters
    assert found.whole["gate.d.weight"] == "it is also used whole"


class Deep(nn.Module):
    """Layers of two kinds, one of them with its own rule."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer(4, 2) if i % 2 else Gated(8) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_one_block_of_each_kind_is_followed() -> None:
    model = Deep(6)
    with mock.patch.object(planner, "trace", wraps=planner.trace) as followed:
        found = plan(model, 2)
        (module, _), _ = followed.call_args
        assert [name for name, _ in module.layers.named_children()] == ["0", "1"]
        assert len(found.parameters) == 6 * 3 and len(found.attributes) == 3 * 2
        assert found.inputs["layers.4.c"] != found.inputs["layers.0.c"]
        compared(model, found)
        rules = by({"patterns": [r"layers\.4\."], "partition_type": "skip"})
        assert "layers.4.c.weight" not in plan(model, 2, **rules).parameters
        (module, _), _ = followed.call_args
        assert [name for name, _ in module.layers.named_children()] == ["0", "1", "4"]


def test_a_forward_that_counts_its_blocks_is_followed_with_all() -> None:
    class Counting(Deep):
        def forward(self, x: Tensor) -> Tensor:
            for i in range(4):
                x = x + self.layers[i](x)
            return x

    assert plan(Counting(4), 2).parameters == plan(Deep(4), 2).parameters
