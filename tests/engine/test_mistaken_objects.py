"""Objects that do not belong together, or are used beside the engine or after it: refused or named, never silent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import deepspeed
from deepspeed.engine import misuse as engine_steps
from tests.pool import distributed

STAGES = [0, 1, 2, 3]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def config_for(stage: int, *, named: bool = True, **more: Any) -> dict[str, Any]:
    section = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}} if named else {}
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, **section, **more}


def train(engine: Any, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()


def weights(engine: Any) -> list[Tensor]:
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params):
        return [param.detach().clone() for param in params]


def of_a_copy(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(copy.deepcopy(model).parameters())}


def partly_of_a_loss(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(1))])}


def parameters_of_a_copy(model: nn.Module) -> dict[str, Any]:
    return {"model_parameters": copy.deepcopy(model).parameters()}


def group_of_a_copy(model: nn.Module) -> dict[str, Any]:
    return {"model_parameters": [{"params": copy.deepcopy(model).parameters(), "lr": 0.1}]}


def made_of_foreign_ones(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": lambda params: torch.optim.AdamW(copy.deepcopy(model).parameters())}


def before_the_model_was_wrapped(model: nn.Module) -> dict[str, Any]:
    """As adapters do: what the optimizer holds is frozen, and something new is trained."""
    optimizer = torch.optim.AdamW(model.parameters())
    model.requires_grad_(False)
    model.add_module("adapter", nn.Linear(2, 2))
    return {"optimizer": optimizer}


FOREIGN: list[tuple[Callable[[nn.Module], dict[str, Any]], str]] = [
    (of_a_copy, "4 of the 4 parameters in the optimizer are not in the model"),
    (partly_of_a_loss, "1 of the 5 parameters in the optimizer are not in the model"),
    (parameters_of_a_copy, "4 of the 4 parameters in the optimizer are not in the model"),
    (group_of_a_copy, "4 of the 4 parameters in the optimizer are not in the model"),
    (made_of_foreign_ones, "4 of the 4 parameters in the optimizer are not in the model"),
    (before_the_model_was_wrapped, "the 4 parameters in the optimizer are all frozen"),
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("given", "text"), FOREIGN)
@distributed(world_size=1)
def test_an_optimizer_of_another_model_is_refused(
    stage: int, given: Callable[[nn.Module], dict[str, Any]], text: str
) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=text):
        deepspeed.initialize(model=model, config=config_for(stage), **given(model))


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=1)
def test_an_exhausted_generator_is_named(stage: int) -> None:
    model = make_model()
    params = model.parameters()
    assert len(list(params)) == 4
    with pytest.raises(ValueError, match="model_parameters is empty.*consumed once"):
        deepspeed.initialize(model=model, model_parameters=params, config=config_for(stage))


MISTAKEN: dict[str, Callable[[nn.Module], Any]] = {
    "is a dict: pass": lambda model: dict(model.named_parameters()),
    "is a Parameter: pass": lambda model: next(model.parameters()),
    "holds a dict: pass": lambda model: [{"lr": 0.1}],
    "holds a list: pass": lambda model: [list(model.parameters())],
    "holds a str: pass": lambda model: model.state_dict(),
}


@pytest.mark.parametrize("text", MISTAKEN)
@distributed(world_size=1)
def test_what_is_no_parameter_is_named(text: str) -> None:
    model = make_model()
    given = MISTAKEN[text](model)
    with pytest.raises(TypeError, match=f"model_parameters {text}.*such as model.parameters"):
        deepspeed.initialize(
            model=model, model_parameters=list(given) if "str" in text else given, config=config_for(0)
        )


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=1)
def test_one_group_is_a_list_of_one(stage: int) -> None:
    model = make_model()
    group = {"params": list(model.parameters()), "lr": 0.25}
    _, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=group, config=config_for(stage))
    assert [each["lr"] for each in optimizer.param_groups] == [0.25]


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=1)
def test_a_frozen_model_is_named(stage: int) -> None:
    model = make_model().requires_grad_(False)
    if stage in (1, 2):
        with pytest.raises(ValueError, match="all parameters of the model are frozen"):
            deepspeed.initialize(model=model, config=config_for(stage))
        return
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[], config=config_for(stage))
    assert engine(torch.ones(2, 4)).shape == (2, 2)
    with pytest.raises(RuntimeError, match="all were frozen"):
        engine.backward(torch.ones(1))
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=1)
def test_use_after_destroy_is_named(stage: int) -> None:
    engine, *_ = deepspeed.initialize(model=make_model(), config=config_for(stage))
    train(engine)
    engine.destroy()
    loss = engine(torch.ones(2, 4)).sum()
    for use in (lambda: engine.backward(loss), engine.step, lambda: engine.scale(loss)):
        with pytest.raises(RuntimeError, match=r"after engine.destroy\(\)"):
            use()


@distributed(world_size=1)
def test_a_loader_is_not_a_data_set() -> None:
    loader = DataLoader(torch.ones(8, 4), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="this is a DataLoader: pass its data set"):
        deepspeed.initialize(model=make_model(), training_data=loader, config=config_for(0))


@distributed(world_size=1)
def test_a_generator_is_not_a_data_set() -> None:
    with pytest.raises(TypeError, match="this is a generator: pass its data set"):
        deepspeed.initialize(model=make_model(), training_data=(x for x in [1]), config=config_for(0))


@pytest.mark.parametrize("given", ["cosine", {"type": "WarmupLR"}])
@distributed(world_size=1)
def test_the_name_of_a_schedule_is_no_schedule(given: Any) -> None:
    with pytest.raises(TypeError, match="lr_scheduler must be a scheduler or a callable, not "):
        deepspeed.initialize(model=make_model(), lr_scheduler=given, config=config_for(0))


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=1)
def test_named_parameters_train_as_in_torch(stage: int) -> None:
    found = []
    for arguments in ({}, {"model_parameters": lambda model: list(model.named_parameters())[1:]}):
        model = make_model()
        given = {key: value(model) for key, value in arguments.items()}
        engine, *_ = deepspeed.initialize(model=model, config=config_for(stage), **given)
        before = weights(engine)
        train(engine)
        found.append([not torch.equal(*pair) for pair in zip(before, weights(engine), strict=True)])
        engine.destroy()
    assert found == [[True] * 4, [False, True, True, True]]


@distributed(world_size=1)
def test_zenflow_tells_torchs_sgd_from_ours() -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    config = config_for(2, named=False)
    config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.1}}
    with pytest.raises(ValueError, match=r"cannot be combined with torch\.optim\.SGD: .*'optimizer' section"):
        deepspeed.initialize(model=model, optimizer=sgd, config=config)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=1)
def test_a_step_of_the_optimizer_is_noticed_once(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(engine_steps, "log_dist", lambda text, **_: said.append(text))
    model = make_model()
    client = torch.optim.AdamW(model.parameters())
    config = config_for(stage, named=False, gradient_accumulation_steps=2)
    engine, returned, *_ = deepspeed.initialize(model=model, optimizer=client, config=config)
    train(engine, 4)
    assert said == []
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).sum())
        (client if stage % 2 else returned).step()
    assert engine.global_steps == 2
    assert len(said) == 1 and "instead of engine.step()" in said[0]
    engine.destroy()
    client.step()  # alone, this is correct use
    assert len(said) == 1


@distributed(world_size=1)
def test_another_engine_of_the_same_optimizer_steps_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(engine_steps, "log_dist", lambda text, **_: said.append(text))
    model = make_model()
    client = torch.optim.AdamW(model.parameters())
    first, *_ = deepspeed.initialize(model=model, optimizer=client, config=config_for(0, named=False))
    second, *_ = deepspeed.initialize(model=model, optimizer=client, config=config_for(0, named=False))
    train(second)
    assert said == []
    client.step()
    assert len(said) == 1
    first.destroy()
    second.destroy()


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_an_update_without_gradient_is_noticed_once(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(engine_steps, "log_dist", lambda text, **_: said.append(text))
    config = config_for(stage, gradient_accumulation_steps=2)
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    train(engine, 2)
    # One rank without data is no mistake: the other's gradients count.
    if engine.global_rank == 0 or stage > 1:
        train(engine, 2)
    else:
        engine.step()
        engine.step()
    assert said == []
    before = weights(engine)
    for _ in range(4):
        engine.step()
    assert len(said) == 1 and "engine.step() without a gradient" in said[0]
    assert all(map(torch.equal, before, weights(engine)))
    engine.destroy()
