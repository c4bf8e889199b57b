"""Arguments of optimizers and schedules that would train to nonsense, or fail late: refused with all other errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.base.logging import logger
from deepspeed.config.arguments import OPTIMIZER, SCHEDULES, WHOLE_NUMBERS
from deepspeed.config.constants import DEEPSPEED_OPTIMIZERS
from deepspeed.config.deepspeed_config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.config.optimizers import BUILT_IN, COMPACT_KEYS, check_optimizer
from deepspeed.config.problems import Problem
from deepspeed.optim.lr_schedules import VALID_LR_SCHEDULES
from deepspeed.optim.scheduler_choice import resolve_scheduler
from deepspeed.zero.optimizer_registry import imported

NAN, INF = math.nan, math.inf


def problems(config: dict[str, Any]) -> list[Problem]:
    """`initialize` refuses the value, and `ds_check` reports the same."""
    report = deepspeed.check_config({"train_batch_size": 1} | config, 1)
    try:
        DeepSpeedConfig({"train_batch_size": 1} | config)
    except DeepSpeedConfigError as error:
        assert [str(problem) for problem in error.problems] == [str(problem) for problem in report.errors]
        return error.problems
    return report.errors


def of_optimizer(name: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


def of_schedule(name: str, **params: Any) -> dict[str, Any]:
    needed: dict[str, Any] = {
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
        "WarmupDecayLR": {"total_num_steps": 10},
        "WarmupCosineLR": {"total_num_steps": 10},
    }.get(name, {})
    return {"scheduler": {"type": name, "params": needed | params}}


BAD_OPTIMIZERS: list[tuple[str, str, Any, str]] = [
    ("AdamW", "weight_decay", None, "null is not allowed; expected a number from 0"),
    ("AdamW", "weight_decay", -0.1, "a number from 0"),
    ("AdamW", "weight_decay", NAN, "a number from 0"),
    ("AdamW", "lr", None, "null is not allowed"),
    ("AdamW", "lr", -1, "a number from 0"),
    ("AdamW", "lr", "1e-3", "write 0.001 without quotes"),
    ("AdamW", "lr", "quick", "a number from 0"),
    ("AdamW", "lr", True, "true is not allowed"),
    ("AdamW", "lr", -INF, "a number from 0"),
    ("AdamW", "lr", 1e30, "a number from 0"),
    ("AdamW", "eps", 1e30, "a number from 0 to 1"),
    ("AdamW", "eps", -1e-8, "a number from 0 to 1"),
    ("AdamW", "betas", [0.9, 1.0], "but not including, 1"),
    ("AdamW", "betas", [0.9], "a list of numbers"),
    ("AdamW", "betas", 0.9, "a list of numbers"),
    ("AdamW", "betas", [0.9, NAN], "a list of numbers"),
    ("AdamW", "betas", ["0.9", 0.99], "a list of numbers"),
    ("Adam", "amsgrad", "false", "write false without quotes"),
    ("Adam", "adam_w_mode", "true", "write true without quotes"),
    ("Adam", "torch_adam", 1, "true or false"),
    ("SGD", "momentum", 1.5, "a number from 0 to 1"),
    ("SGD", "nesterov", "no", "true or false"),
    ("Lion", "betas", [0.9, -0.1], "a list of numbers"),
    ("Adagrad", "lr_decay", -1, "a number from 0"),
    ("Lamb", "max_coeff", INF, "a number from 0"),
    ("Rprop", "etas", [1.2, 0.5], "two numbers, below and above 1"),
    ("RMSprop", "alpha", NAN, "a number from 0 to 1"),
    ("Adafactor", "eps", [None, 1e30], "a number from 0 to 1"),
    ("Adadelta", "rho", 2, "a number from 0 to 1"),
    ("LBFGS", "tolerance_grad", NAN, "finite numbers"),
    ("Muon", "muon_lr", -0.1, "a number from 0"),
]


@pytest.mark.parametrize(("name", "key", "value", "told"), BAD_OPTIMIZERS)
def test_values_that_no_optimizer_can_use(name: str, key: str, value: Any, told: str) -> None:
    (found,) = problems(of_optimizer(name, **{key: value}))
    assert found.key == f"optimizer.params.{key}" and told in found.message
    assert any(f"optimizer.params.{key}=" in text for text in check_optimizer(name, {key: value}))


BAD_SCHEDULES: list[tuple[str, str, Any, str]] = [
    ("WarmupLR", "warmup_min_lr", None, "null is not allowed; expected a number from 0"),
    ("WarmupLR", "warmup_max_lr", "1e-3", "write 0.001 without quotes"),
    ("WarmupLR", "warmup_max_lr", -1e-3, "a number from 0"),
    ("WarmupLR", "warmup_max_lr", -INF, "a number from 0"),
    ("WarmupLR", "warmup_max_lr", [0.1, -0.1], "a number from 0"),
    ("WarmupLR", "warmup_num_steps", -1, "a whole number >= 0"),
    ("WarmupLR", "warmup_num_steps", 1.5, "a whole number >= 0"),
    ("WarmupLR", "warmup_num_steps", None, "a whole number >= 0"),
    ("WarmupLR", "warmup_type", 3, "text"),
    ("WarmupDecayLR", "total_num_steps", 0, "a whole number >= 1"),
    ("WarmupDecayLR", "total_num_steps", "100", "write 100 without quotes"),
    ("WarmupDecayLR", "warmup_max_lr", NAN, "a number from 0"),
    ("WarmupCosineLR", "cos_min_ratio", -0.1, "a number from 0"),
    ("WarmupCosineLR", "total_num_steps", INF, "a whole number >= 1"),
    ("OneCycle", "cycle_min_lr", None, "null is not allowed"),
    ("OneCycle", "cycle_max_lr", -1.0, "a number from 0"),
    ("OneCycle", "cycle_first_step_size", 0, "a whole number >= 1"),
    ("OneCycle", "cycle_second_step_size", -1, "a whole number >= 0"),
    ("OneCycle", "decay_step_size", -3, "a whole number >= 0"),
    ("OneCycle", "cycle_momentum", "false", "write false without quotes"),
    ("OneCycle", "cycle_max_mom", 1.0, "but not including, 1"),
    ("OneCycle", "cycle_min_mom", [0.8, NAN], "but not including, 1"),
    ("OneCycle", "decay_lr_rate", NAN, "a number from 0"),
    ("LRRangeTest", "lr_range_test_step_size", 0, "a whole number >= 1"),
    ("LRRangeTest", "lr_range_test_min_lr", "small", "a number from 0"),
    ("LRRangeTest", "lr_range_test_staircase", 1, "true or false"),
    ("LRRangeTest", "last_batch_iteration", -2, "a whole number >= -1"),
    ("ExponentialLR", "gamma", NAN, "finite numbers"),
]


@pytest.mark.parametrize(("name", "key", "value", "told"), BAD_SCHEDULES)
def test_values_that_a_schedule_cannot_use(name: str, key: str, value: Any, told: str) -> None:
    (found,) = problems(of_schedule(name, **{key: value}))
    assert found.key == f"scheduler.params.{key}" and told in found.message


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("OneCycle", "cycle_max_lr"),
        ("WarmupDecayLR", "total_num_steps"),
        ("WarmupCosineLR", "total_num_steps"),
    ],
)
def test_what_a_schedule_needs(name: str, key: str) -> None:
    config = of_schedule(name)
    del config["scheduler"]["params"][key]
    (found,) = problems(config)
    assert found.key == f"scheduler.params.{key}" and f"is missing: {name} needs it" in found.message
    config["scheduler"]["params"][key] = "auto"  # Trainer fills it in
    assert problems(config) == []


def test_auto_is_no_excuse_for_an_unknown_name() -> None:
    """Nobody fills it in: as an error it is as clear as with any other value."""
    (found,) = problems(of_optimizer("AdamW", lr="auto", learning_rate="auto"))
    assert found.key == "optimizer.params.learning_rate" and "unknown" in found.message
    (found,) = problems(of_schedule("WarmupLR", warmup_max_lr="auto", warmup_max="auto"))
    assert found.key == "scheduler.params.warmup_max" and "unknown" in found.message
    assert problems(of_schedule("StepLR", step_size=3, gamma="auto")) == []


@pytest.mark.parametrize(
    "config",
    [
        of_optimizer("AdamW", lr=0, eps=0, betas=[0, 0.999], weight_decay=0, amsgrad=False),
        of_optimizer("AdamW", lr="auto", betas="auto", weight_decay="auto"),
        of_optimizer("SGD", lr=10, momentum=1, dampening=0.5, nesterov=False),
        of_optimizer("Adafactor", eps=[None, 1e-3]),
        of_optimizer("Adafactor", lr=torch.tensor(0.1)),
        of_optimizer("RAdam", foreach=None, capturable=False, maximize=True),
        of_optimizer("Rprop", etas=[0.5, 1.2], step_sizes=[1e-6, 50]),
        of_schedule("WarmupLR", warmup_max_lr=None, warmup_num_steps=0, warmup_min_lr=[0.0, 0.1]),
        of_schedule("WarmupLR", warmup_num_steps=1e3),
        of_schedule(
            "OneCycle", cycle_second_step_size=0, cycle_first_stair_count=-1, cycle_min_mom=[0.8, 0.85]
        ),
        of_schedule("StepLR", step_size=3, gamma=0.1),
    ],
)
def test_values_that_are_fine(config: dict[str, Any]) -> None:
    assert problems(config) == []


def test_all_of_them_at_once() -> None:
    config = of_optimizer(lr=-1, weight_decay=None, eps=1e30) | of_schedule("WarmupLR", warmup_min_lr=None)
    config |= {"gradient_predivide_factor": 1e308, "fp16": {"enabled": "yes, please"}}
    assert {problem.key for problem in problems(config)} == {
        "gradient_predivide_factor",
        "fp16.enabled",
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
        "optimizer.params.eps",
        "scheduler.params.warmup_min_lr",
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gradient_predivide_factor", 1e308),
        ("gradient_predivide_factor", INF),
        ("gradient_predivide_factor", NAN),
        ("gradient_clipping", NAN),
        ("gradient_clipping", -INF),
    ],
)
def test_numbers_at_top_level(key: str, value: float) -> None:
    assert [problem.key for problem in problems({key: value})] == [key]
    assert problems({"gradient_clipping": INF}) == []


def test_the_tables_name_arguments_that_exist() -> None:
    import inspect

    from deepspeed.optim import lr_schedules

    for name in VALID_LR_SCHEDULES:
        assert set(SCHEDULES[name]) == set(inspect.signature(getattr(lr_schedules, name)).parameters) - {
            "optimizer"
        }
    torchs = [
        c for c in vars(torch.optim).values() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    ]
    known = {p for c in torchs for p in inspect.signature(c).parameters}
    assert set(OPTIMIZER) <= known.union(*(built_in.arguments for built_in in BUILT_IN.values()))
    assert set(DEEPSPEED_OPTIMIZERS) < BUILT_IN.keys()
    for name, built_in in BUILT_IN.items():
        _params, *taken = inspect.signature(imported(built_in.path)).parameters
        chooses = (
            {"torch_adam", "fp32_optimizer_states", *COMPACT_KEYS} if "fused_adam" in built_in.path else set()
        )
        assert built_in.arguments == {*taken, *chooses}, name


def test_round_floats_count_steps() -> None:
    config = DeepSpeedConfig(
        {"train_batch_size": 1} | of_schedule("WarmupDecayLR", warmup_num_steps=2e0, total_num_steps=1e1)
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = resolve_scheduler(config, None, optimizer)
    assert schedule.warmup_num_steps == 2 and schedule.total_num_steps == 10
    assert "total_num_steps" in WHOLE_NUMBERS and "cycle_min_lr" not in WHOLE_NUMBERS


def test_a_schedule_of_another_optimizer_is_taken_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    config = DeepSpeedConfig({"train_batch_size": 1})
    weight = torch.nn.Parameter(torch.zeros(1))
    trained, other = (torch.optim.SGD([weight], lr=0.1) for _ in range(2))
    schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 0.5)
    assert resolve_scheduler(config, schedule, trained, None) is schedule
    assert "does not control the learning rates" in caplog.text
    caplog.clear()
    assert resolve_scheduler(config, schedule, other, other) is schedule and not caplog.text
