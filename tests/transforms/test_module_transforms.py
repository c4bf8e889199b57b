"""Order, reports and refusals of transforms, and what becomes of optimizers that were made before them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.transforms import (
    LowRank,
    Part,
    TransformContext,
    TransformError,
    Weight,
    request,
    transforms_of,
)
from deepspeed.transforms.ordering import MODULE_ORDER, sort_transforms
from tests.pool import distributed
from tests.transforms.users import Adapters, Fusion, Model, make_model, settings, start, tokens, train


@dataclass(frozen=True)
class Named:
    name: str
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    change: Any = None

    def apply(self, module: Any, context: TransformContext) -> None:
        if self.change is not None:
            self.change(module, context)


def sorted_names(*transforms: Named) -> list[str]:
    return [each.name for each in sort_transforms(transforms, MODULE_ORDER)]


def test_order() -> None:
    a, b, c = Named("a"), Named("b", before=("a",)), Named("c", after=("b",), before=("tensor_parallel",))
    assert sorted_names(a, b, c) == ["b", "a", "c"]
    assert sorted_names(a, Named("z")) == ["a", "z"]  # as given
    assert sorted_names(Named("lora"), Named("tensor_parallel"), Named("layer_reduction")) == [
        "layer_reduction",
        "tensor_parallel",
        "lora",
    ]
    assert sorted_names(Named("tensor_parallel"), c, b, a) == ["b", "c", "tensor_parallel", "a"]


@pytest.mark.parametrize(
    "transforms, message",
    [
        ((Named("a"), Named("a")), "two transforms are named 'a'"),
        ((Named("a", after=("lorra",)),), "'a' runs after 'lorra', which .* did you mean 'lora'"),
        (
            (Named("a", before=("q",)),),
            "'a' runs before 'q', which is not .*: a, compression, expert_parallel",
        ),
        (
            (Named("a", after=("b",)), Named("b", after=("a",))),
            "no order is possible for a, b: a after b, b after a",
        ),
        (
            (Named("lora", before=("tensor_parallel",)), Named("tensor_parallel")),
            "lora before tensor_parallel",
        ),
    ],
)
def test_no_order(transforms: tuple[Named, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sort_transforms(transforms, MODULE_ORDER)


@distributed(world_size=1)
def test_reports() -> None:
    """One from the config and three by request; each is reported at the start."""
    lines: list[str] = []
    grown = Named("grown", change=lambda module, _: module.register_buffer("more", torch.zeros(3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.engine.observers.progress.start_report.reporter", lambda _: lines.append)
        made_by_config = (lambda config: Fusion(), lambda config: None)
        patch.setattr("deepspeed.parallel.selection.FROM_CONFIG", made_by_config)
        engine = start(2, Adapters("both", after=("fusion",)), grown, Named("idle"))
    told = [line.removeprefix("transform ") for line in lines if line.startswith("transform ")]
    assert told == [
        "fusion: 4 modules changed, 4 parameters (216 elements) added, 8 parameters (216 elements) removed",
        "lora: rank 2, 4 modules changed, 4 parameters (80 elements) added, 9 parameters (464 elements) frozen",
        "grown: 1 module changed; new names that stay in exports: 1",
        "idle: nothing to change",
    ]
    assert [report.line() for report in engine.module_transforms.reports] == ["transform " + t for t in told]
    engine.destroy()
    start(2).destroy()


@distributed(world_size=1)
def test_a_second_engine_finds_the_module_as_it_is() -> None:
    engine = start(2, Adapters())
    model = engine.module
    names = list(model.state_dict())
    with pytest.raises(
        TransformError, match="'fusion' comes too late: an engine already holds the module's weights"
    ):
        request(model, Fusion())
    engine.destroy()
    request(model, Adapters())
    again, *_ = deepspeed.initialize(model=model, config=settings(0))
    assert list(model.state_dict()) == names and again.module_transforms.names == ["lora"]
    twin = copy.deepcopy(model)
    assert transforms_of(twin).names == ["lora"] and transforms_of(twin) is not transforms_of(model)
    revived = pickle.loads(pickle.dumps(transforms_of(model)))
    assert revived.originals == transforms_of(model).originals and not revived.requested
    request(twin, Adapters("key", name="more"))
    assert not transforms_of(model).requested
    third, *_ = deepspeed.initialize(model=twin, config=settings(0))
    assert third.module_transforms.names == ["lora", "more"]
    weights = third._consolidated_16bit_state_dict()
    make_model().load_state_dict(weights)
    again.destroy()
    third.destroy()


def break_off(module: Model, context: TransformContext) -> None:
    module.requires_grad_(False)
    module.norm = nn.Identity()  # type: ignore[assignment]
    module.blocks[0].out.weight = None  # type: ignore[assignment]
    module.extra = 1  # type: ignore[assignment]
    raise KeyError("no such layer")


def shrink_and_break_off(module: Model, context: TransformContext) -> None:
    module.embed.weight.data = module.embed.weight.data[:5].clone()
    raise KeyError("no such layer")


def on_query(make_path: str, made_of: Any) -> Any:
    def change(module: Model, context: TransformContext) -> None:
        Adapters().apply(module, context)
        context.originals.clear()
        context.original(make_path, made_of)

    return change


WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "it fails": (
        (Fusion(), Named("bad", change=break_off)),
        r"'bad' failed: KeyError: 'no such layer' \(the module is unchanged\)",
    ),
    "it fails late": (
        (Named("bad", change=shrink_and_break_off),),
        r"is unchanged, except for embed\.weight, changed in place",
    ),
    "claimed twice": (
        (Fusion(), Adapters("both")),
        r"'lora' failed: .* it changes blocks\.0\.both, which .* 'fusion' has already changed; .*after=\('fusion',\)",
    ),
    "thrown away": (
        (Fusion(), Named("other", change=lambda module, _: setattr(module, "blocks", nn.ModuleList()))),
        "'other' failed: .* it changes blocks",
    ),
    "an original that never was": (
        (Named("bad", change=on_query("blocks.7.query.weight", Weight("norm.weight"))),),
        r"it describes blocks\.7\.query\.weight, which the module did not have",
    ),
    "made of nothing": (
        (Named("bad", change=on_query("blocks.0.query.weight", Weight("blocks.0.query.weight"))),),
        r"makes blocks\.0\.query\.weight of blocks\.0\.query\.weight, which the module does not have",
    ),
    "another shape": (
        (Named("bad", change=on_query("blocks.0.query.weight", Weight("blocks.0.query.up"))),),
        r"of shape \(8, 2\), which was \(8, 8\)",
    ),
    "parts that do not fit": (
        (
            Named(
                "bad",
                change=on_query(
                    "blocks.0.query.weight",
                    LowRank(Weight("blocks.0.query.base.weight"), *[Weight("blocks.0.query.up")] * 2),
                ),
            ),
        ),
        r"matrices of shapes \(8, 2\) and \(8, 2\) cannot be added to one of \(8, 8\)",
    ),
    "a part beyond the end": (
        (Named("bad", change=on_query("norm.weight", Part(Weight("norm.weight"), 0, 0, 9))),),
        r"0 to 9 is not within dimension 0 of \(8,\)",
    ),
    "dropped, but not there": (
        (Named("bad", change=lambda _, context: context.drop("mask")),),
        "it drops mask, which the module does not have",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@distributed(world_size=1)
def test_one_that_fails_is_named_and_taken_back(case: str) -> None:
    transforms, message = WRONG[case]
    model = make_model()
    before = dict(model.named_modules())
    params = {name: (id(param), param.requires_grad) for name, param in model.named_parameters()}
    for transform in transforms:
        request(model, transform)
    with pytest.raises(TransformError, match=message):
        deepspeed.initialize(model=model, config=settings(2))
    assert dict(model.named_modules()) == before and not hasattr(model, "extra")
    assert {name: (id(p), p.requires_grad) for name, p in model.named_parameters()} == params
    if case != "it fails late":
        transforms_of(model).requested[:] = [Adapters()]  # after mending it, the module can be used
        engine, *_ = deepspeed.initialize(model=model, config=settings(2))
        train(engine, 0)
        engine.destroy()


def grouped(model: Model) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]


MADE_BEFORE: dict[str, Any] = {
    "optimizer": lambda model: {"optimizer": torch.optim.AdamW(grouped(model), lr=1e-2)},
    "callable": lambda model: {
        "optimizer": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        "model_parameters": grouped(model),
    },
    "groups": lambda model: {"model_parameters": grouped(model)},
    "parameters": lambda model: {"model_parameters": model.parameters()},
}


@pytest.mark.parametrize("made", MADE_BEFORE)
@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=1)
def test_optimizers_follow(made: str, stage: int) -> None:
    """Objects passed by a script before the transforms hold the new parameters afterwards, each in the group of the one
    that it replaces."""
    model = make_model()
    request(model, Fusion())
    request(model, replace(Adapters("both"), after=("fusion",)))
    given = MADE_BEFORE[made](model)
    config = settings(stage)
    if "optimizer" in given:
        del config["optimizer"]
    engine, *_ = deepspeed.initialize(model=model, config=config, **given)
    groups = engine.basic_optimizer.param_groups
    held = {id(p): group.get("weight_decay") for group in groups for p in group["params"]}
    current = {id(p) for p in model.parameters()}
    before = {name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad}
    adapters = [p for name, p in model.named_parameters() if name.endswith(("up", "down"))]
    assert held.keys() <= current and {held[id(p)] for p in adapters} == {held[id(adapters[0])]}
    if made != "parameters":
        assert held[id(adapters[0])] == 0.1
    train(engine, 0)
    engine.destroy()
    assert len(before) == 4
    assert all(
        not torch.equal(before[name], p) or stage == 3
        for name, p in model.named_parameters()
        if p.requires_grad
    )


@distributed(world_size=1)
def test_optimizers_that_cannot_follow() -> None:
    def forgetful(module: Model, context: TransformContext) -> None:
        module.blocks[0].query = nn.Linear(8, 8)

    def merge(module: Model, context: TransformContext) -> None:
        context.replace_param(module.blocks[0].query.weight, module.norm.weight)
        context.replace_param(module.norm.bias, module.norm.weight)

    for change, message in (
        (forgetful, r"holds blocks\.0\.query\.weight, which transform 'bad' took out of the module"),
        (merge, "different optimizer groups became one parameter"),
    ):
        for name in ("optimizer", "groups"):
            model = make_model()
            request(model, Named("bad", change=change))
            with pytest.raises(ValueError, match=message):
                deepspeed.initialize(model=model, config=settings(2), **MADE_BEFORE[name](model))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(0)).backward()
    optimizer.step()
    request(model, Fusion())
    with pytest.raises(ValueError, match="has state for parameters that transforms of the module replaced"):
        deepspeed.initialize(model=model, config=settings(2), optimizer=optimizer)


@distributed(world_size=1)
def test_they_come_before_the_first_check_of_the_module() -> None:
    """One may mend what an engine would refuse, and finds the weights where the client left them, uncast."""
    seen: dict[str, Any] = {}

    def materialize(module: Model, context: TransformContext) -> None:
        seen.update(dtype=module.norm.weight.dtype, plan=context.plan, ranks=context.mesh.size("dp"))
        module.norm.to_empty(device="cpu")
        module.norm.reset_parameters()

    model = make_model()
    model.norm.to("meta")
    request(model, Named("loading", change=materialize))
    engine, *_ = deepspeed.initialize(model=model, config=settings(2, bf16={"enabled": True}))
    assert seen == {"dtype": torch.float32, "plan": engine.plan, "ranks": 1}
    assert model.norm.weight.dtype is torch.bfloat16
    engine.destroy()
