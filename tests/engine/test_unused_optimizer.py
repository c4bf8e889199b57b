"""The config's `optimizer` section if `initialize` gets an optimizer, or if no client fills it in."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from tests.pool import distributed

SECTIONS = {
    "max_grad_norm": {"type": "Adam", "params": {"lr": 0.1, "max_grad_norm": 1.0}},
    "an own class": {"type": "MyOptimizer", "params": {"lr": 0.1, "cleverness": 11}},
    "YAML 1.1": {"type": "AdamW", "params": {"lr": 0.1, "eps": "1e-8"}},
    "no type": {"params": {"lr": 0.1}},
}


def warned(**arguments: Any) -> tuple[Any, list[str]]:
    """An engine and the warnings that the config's reader gives."""
    with (
        mock.patch("deepspeed.config.deepspeed_config.logger") as log,
        mock.patch("deepspeed.config.section.logger", log),
    ):
        engine, *_ = deepspeed.initialize(**arguments)
    return engine, [str(call.args[0]) for call in log.warning.call_args_list]


@distributed(world_size=1)
@pytest.mark.parametrize("name", list(SECTIONS))
@pytest.mark.parametrize("made", ["object", "callable"])
def test_a_section_beside_a_clients_optimizer_is_not_used(name: str, made: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    config = {"train_batch_size": 1, "gradient_clipping": 0.0, "optimizer": SECTIONS[name]}
    with pytest.raises(DeepSpeedConfigError, match="optimizer"):
        deepspeed.initialize(model=model, config=config)
    expected = model.weight.detach() - 0.5 * torch.ones(2, 3)

    def optimizer_of(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.5)

    given = optimizer_of(model.parameters()) if made == "object" else optimizer_of
    engine, warnings = warned(model=model, config=config, optimizer=given)
    assert warnings == ["config section 'optimizer' is not used: an optimizer was passed to initialize"]
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    torch.testing.assert_close(engine.module.weight.detach(), expected)


@distributed(world_size=1)
def test_a_section_beside_a_clients_scheduler_is_not_used() -> None:
    model = nn.Linear(3, 2)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "scheduler": {"type": "MySchedule", "params": {"cleverness": 11}},
    }
    with pytest.raises(DeepSpeedConfigError, match="MySchedule"):
        deepspeed.initialize(model=model, config=config)

    def halved(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    engine, warnings = warned(model=model, config=config, lr_scheduler=halved)
    assert warnings == ["config section 'scheduler' is not used: a scheduler was passed to initialize"]
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    assert engine.get_lr() == [0.25]


@distributed(world_size=1)
def test_a_length_that_nobody_fills_in_is_named() -> None:
    settings: dict[str, Any] = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    with pytest.raises(
        DeepSpeedConfigError, match="scheduler.params does not fit WarmupDecayLR: .*total_num_steps"
    ):
        deepspeed.initialize(model=nn.Linear(2, 2), config=settings)


@distributed(world_size=1)
def test_a_learning_rate_that_nobody_fills_in_is_said() -> None:
    settings: dict[str, Any] = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    }
    _, (_, of_schedule) = warned(model=nn.Linear(2, 2), config=settings)
    assert of_schedule.startswith("scheduler.params.warmup_num_steps: 'auto' was not filled in by a client")
    del settings["scheduler"]
    engine, warnings = warned(model=nn.Linear(2, 2), config=settings)
    assert engine.get_lr() == [torch.optim.AdamW([torch.zeros(1)]).defaults["lr"]]
    (warning,) = warnings
    assert warning.startswith("optimizer.params.lr: 'auto' was not filled in by a client")
