"""Schedules against closed forms and against what an independent implementation was seen to do."""

from __future__ import annotations

import argparse
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.optim import lr_schedules
from deepspeed.optim.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from tests.optim.observed import OBSERVED, Observed

LR = 0.02


def _optimizer(lrs: tuple[float, ...] = (LR,), cls: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    return cls([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs], lr=LR)


def _rates(schedule: Any, steps: int) -> list[float]:
    """The rate in the optimizer after each step."""
    rates = []
    for _ in range(steps):
        schedule.step()
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        assert (
            schedule.get_last_lr() == schedule.get_lr() == [g["lr"] for g in schedule.optimizer.param_groups]
        )
    return rates


@pytest.mark.parametrize("observed", OBSERVED, ids=lambda o: o.case)
def test_rates_and_momenta_as_observed(observed: Observed) -> None:
    optimizer = _optimizer(observed.initial_lrs)
    schedule = getattr(lr_schedules, observed.schedule)(optimizer, **observed.arguments)
    for i, expected in enumerate(observed.rows):
        if i > 0:
            schedule.step()
        found = [group["lr"] for group in optimizer.param_groups]
        if observed.momentum:
            found.append(optimizer.param_groups[0]["betas"][0])
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-15), i
    assert schedule.state_dict() == {
        "last_batch_iteration": observed.arguments.get("last_batch_iteration", -1) + len(observed.rows) - 1
    }


# ---- closed forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staircase", [False, True])
def test_lr_range_test(staircase: bool) -> None:
    schedule = LRRangeTest(_optimizer(), 1e-4, 7, 5.0, staircase)
    for i, rate in enumerate(_rates(schedule, 50), start=1):
        interval = i // 7 if staircase else i / 7
        assert rate == pytest.approx(1e-4 * (1 + 5.0 * interval), rel=1e-14)


def test_one_cycle_peaks_returns_and_decays() -> None:
    optimizer = _optimizer()
    schedule = OneCycle(
        optimizer, 1e-3, 1e-1, 0.5, cycle_first_step_size=10, cycle_second_step_size=30, decay_step_size=5
    )
    rates = [1e-3, *_rates(schedule, 60)]
    assert rates[10] == max(rates) == pytest.approx(0.1)
    for i in range(11):
        assert rates[i] == pytest.approx(1e-3 + 0.099 * i / 10)
    for i in range(10, 41):
        assert rates[i] == pytest.approx(1e-3 + 0.099 * (40 - i) / 30)
    for i in range(41, 61):
        assert rates[i] == pytest.approx(1e-3 / (1 + 0.5 * (i - 40) / 5))


def test_one_cycle_momentum_mirrors_the_rate() -> None:
    optimizer = _optimizer()
    schedule = OneCycle(
        optimizer, 1e-3, 1e-2, cycle_first_step_size=4, cycle_min_mom=0.85, cycle_max_mom=0.95
    )
    for _ in range(8):
        schedule.step()
        height = (optimizer.param_groups[0]["lr"] - 1e-3) / 9e-3
        assert optimizer.param_groups[0]["betas"] == (pytest.approx(0.95 - 0.1 * height), 0.999)
        assert schedule.get_mom() == [optimizer.param_groups[0]["betas"]]


def test_one_cycle_takes_a_list_of_momenta() -> None:
    optimizer = _optimizer((0.1, 0.2))
    optimizer.param_groups[1]["betas"] = (0.9, 0.95)
    schedule = OneCycle(
        optimizer,
        [1e-3, 2e-3],
        [1e-2, 2e-2],
        cycle_first_step_size=2,
        cycle_min_mom=[0.8, 0.6],
        cycle_max_mom=[0.9, 0.7],
        decay_step_size=1,
        decay_mom_rate=0.5,
    )
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.8, 0.6]
    seen = []
    for _ in range(5):
        schedule.step()
        assert schedule.get_mom() == [group["betas"] for group in optimizer.param_groups]
        seen.append([group["betas"][0] for group in optimizer.param_groups])
    expected = [[0.85, 0.65], [0.8, 0.6], [0.85, 0.65], [0.9, 0.7], [1.35, 1.05]]
    assert [value for row in seen for value in row] == pytest.approx([v for row in expected for v in row])
    assert [group["betas"][1] for group in optimizer.param_groups] == [0.999, 0.95]
    with pytest.raises(
        ValueError, match="cycle_max_mom has 3 values, but the optimizer has 2 parameter groups"
    ):
        OneCycle(optimizer, 1e-3, 1e-2, cycle_max_mom=[0.9] * 3)


@pytest.mark.parametrize(("second", "steps_down"), [(None, 4), (2, 2), (0, 0)])
def test_one_cycle_without_a_way_down(second: int | None, steps_down: int) -> None:
    schedule = OneCycle(_optimizer(), 1e-3, 1e-2, cycle_first_step_size=4, cycle_second_step_size=second)
    rates = _rates(schedule, 12)
    down = [1e-2 - 9e-3 * i / max(1, steps_down) for i in range(1, steps_down + 1)]
    assert rates == pytest.approx(
        [1e-3 + 9e-3 * i / 4 for i in range(1, 5)] + down + [1e-3] * (8 - steps_down)
    )


def test_one_cycle_tells_its_sizes() -> None:
    schedule = OneCycle(_optimizer(), 1e-3, 1e-2, cycle_first_step_size=4, cycle_first_stair_count=2)
    assert (schedule.first_step_size, schedule.second_step_size) == (4, 4)
    assert (schedule.first_stair_count, schedule.second_stair_count) == (2, 2)
    assert schedule.total_size == 8
    schedule = OneCycle(_optimizer(), 1e-3, 1e-2, cycle_first_step_size=4, cycle_second_step_size=0)
    assert schedule.total_size == 4


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_the_last_rate_before_the_first_step_is_the_starting_one(name: str) -> None:
    arguments = {"WarmupDecayLR": {"total_num_steps": 9}, "WarmupCosineLR": {"total_num_steps": 9}} | {
        "OneCycle": {"cycle_min_lr": 0.25, "cycle_max_lr": 0.5}
    }
    optimizer = _optimizer((0.1, 0.2))
    schedule = getattr(lr_schedules, name)(optimizer, **arguments.get(name, {}))
    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    schedule.step(3)
    assert schedule.state_dict() == {"last_batch_iteration": 3}


def test_one_cycle_leaves_other_momenta_alone() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.5)
    schedule = OneCycle(optimizer, 1e-3, 1e-2, cycle_first_step_size=4)
    schedule.step()
    assert optimizer.param_groups[0]["momentum"] == 0.5 and schedule.get_mom() is None


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_then_constant(kind: str) -> None:
    rates = _rates(WarmupLR(_optimizer(), 0.002, 0.01, 20, kind), 30)
    for i in range(20):
        share = math.log(i + 1) / math.log(20) if kind == "log" else i / 20
        assert rates[i] == pytest.approx(0.002 + 0.008 * share)
    assert rates[20:] == pytest.approx([0.01] * 10)


def test_warmup_then_decay() -> None:
    rates = _rates(WarmupDecayLR(_optimizer(), 50, 0.0, 0.01, 20, "linear"), 60)
    for i in range(20, 50):
        assert rates[i] == pytest.approx(0.01 * (50 - i) / 30)
    assert rates[50:] == [0.0] * 10


def test_warmup_then_cosine() -> None:
    schedule = WarmupCosineLR(_optimizer((LR, 3 * LR)), 50, 0.1, 20, 0.05, "linear")
    rates = _rates(schedule, 60)
    for i in range(20):
        assert rates[i] == pytest.approx(LR * (0.1 + 0.9 * i / 20))
    for i in range(20, 50):
        assert rates[i] == pytest.approx(LR * (0.05 + 0.95 * (1 + math.cos(math.pi * (i - 19) / 30)) / 2))
    assert rates[50:] == pytest.approx([LR * 0.05] * 10)
    assert schedule.get_lr_ratio() == pytest.approx(0.05)
    assert schedule.get_last_lr() == pytest.approx([0.05 * LR, 0.15 * LR])


# ---- interface ---------------------------------------------------------------------------------------------

MAKERS = {
    "LRRangeTest": lambda o: LRRangeTest(o, 1e-4, 5),
    "OneCycle": lambda o: OneCycle(
        o, 1e-3, 1e-2, cycle_first_step_size=5, decay_step_size=2, decay_lr_rate=0.1
    ),
    "WarmupLR": lambda o: WarmupLR(o, warmup_num_steps=5),
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, 12, warmup_num_steps=5),
    "WarmupCosineLR": lambda o: WarmupCosineLR(o, 12, warmup_num_steps=5),
}


def test_every_schedule_is_listed() -> None:
    assert list(MAKERS) == VALID_LR_SCHEDULES


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("position", [0, 1, 4, 7, 15])
def test_resume_continues(name: str, position: int) -> None:
    straight, first = MAKERS[name](_optimizer()), MAKERS[name](_optimizer())
    for _ in range(position):
        straight.step()
        first.step()
    resumed = MAKERS[name](_optimizer())
    resumed.load_state_dict(first.state_dict())
    groups, expected = resumed.optimizer.param_groups[0], straight.optimizer.param_groups[0]
    assert (groups["lr"], groups["betas"]) == (expected["lr"], expected["betas"])
    assert _rates(resumed, 8) == _rates(straight, 8)


@pytest.mark.parametrize("name", MAKERS)
def test_wrapped_optimizers_and_tensor_rates(name: str) -> None:
    inner = _optimizer()
    inner.param_groups[0]["lr"] = tensor = torch.tensor(LR)
    schedule = MAKERS[name](SimpleNamespace(optimizer=inner))
    assert schedule.optimizer is inner
    schedule.step()
    assert inner.param_groups[0]["lr"] is tensor
    assert float(tensor) == pytest.approx(schedule.get_lr()[0])
    with pytest.raises(TypeError, match="SimpleNamespace"):
        MAKERS[name](SimpleNamespace())


@pytest.mark.parametrize("value", [None, -5, 5.0, "7", True])
@pytest.mark.parametrize(
    "make", [WarmupLR, lambda o, **k: WarmupDecayLR(o, 9, **k), lambda o, **k: WarmupCosineLR(o, 9, **k)]
)
def test_warmup_num_steps_must_be_an_integer(make: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=r"warmup_num_steps must be a positive integer, got"):
        make(_optimizer(), warmup_num_steps=value)
    assert make(_optimizer(), warmup_num_steps=0).warmup_num_steps == 2


def test_other_arguments_are_checked() -> None:
    sizes: list[Any] = [0, -1, 2.5, None]
    for size in sizes:
        with pytest.raises(ValueError, match="lr_range_test_step_size"):
            LRRangeTest(_optimizer(), lr_range_test_step_size=size)
    with pytest.raises(ValueError, match="cycle_first_step_size"):
        OneCycle(_optimizer(), 1e-3, 1e-2, cycle_first_step_size=0)
    with pytest.raises(ValueError, match="cycle_second_step_size must not be negative, got -1: leave it out"):
        OneCycle(_optimizer(), 1e-3, 1e-2, cycle_first_step_size=4, cycle_second_step_size=-1)
    with pytest.raises(ValueError, match="cycle_first_step_size must be positive, got -1"):
        OneCycle(_optimizer(), 1e-3, 1e-2, cycle_first_step_size=-1)
    with pytest.raises(ValueError, match="warmup_min_lr has 3 values.*2 parameter groups"):
        WarmupLR(_optimizer((0.1, 0.2)), warmup_min_lr=[0, 1, 2])


# ---- command line ------------------------------------------------------------------------------------------


def _parse(*flags: str) -> argparse.Namespace:
    return lr_schedules.add_tuning_arguments(argparse.ArgumentParser()).parse_args(flags)


def test_config_from_arguments() -> None:
    config, problem = lr_schedules.get_config_from_args(
        _parse("--lr_schedule", "WarmupLR", "--warmup_num_steps", "10")
    )
    assert problem is None and config is not None
    assert config == {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 10, "warmup_type": "log"},
    }
    assert WarmupLR(_optimizer(), **config["params"]).warmup_num_steps == 10


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_flags_of_each_schedule_construct_it(name: str) -> None:
    config, _ = lr_schedules.get_config_from_args(_parse("--lr_schedule", name))
    assert config is not None
    params = config["params"]
    if name in ("WarmupDecayLR", "WarmupCosineLR"):
        params["total_num_steps"] = 5000  # has no flag
    schedule = getattr(lr_schedules, name)(_optimizer(), **params)
    if name == "OneCycle":  # by default as many steps down as up, no stairs
        assert not any(isinstance(value, int) and value < 0 for value in params.values())
        rates = _rates(schedule, 2000)
        assert rates[999] == pytest.approx(0.1) and rates[1499] == pytest.approx(0.055)


def test_stairs_of_the_command_line_are_those_of_both_halves() -> None:
    flags = ("--cycle_first_step_size", "8", "--cycle_first_stair_count", "2")
    config, _ = lr_schedules.get_config_from_args(_parse("--lr_schedule", "OneCycle", *flags))
    assert config is not None
    params = config["params"]
    assert "cycle_second_step_size" not in params  # its flag is -1, which is as many steps as the first
    rates = _rates(OneCycle(_optimizer(), **params), 16)
    assert rates == _rates(OneCycle(_optimizer(), **{**params, "cycle_second_stair_count": 2}), 16)
    assert rates != _rates(OneCycle(_optimizer(), **{**params, "cycle_second_stair_count": 0}), 16)


@pytest.mark.parametrize("flags", [(), ("--cycle_momentum",)])
def test_the_momentum_is_cycled_where_its_flag_is_given(flags: tuple[str, ...]) -> None:
    config, _ = lr_schedules.get_config_from_args(_parse("--lr_schedule", "OneCycle", *flags))
    assert config is not None
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], betas=(0.7, 0.99))
    schedule = OneCycle(optimizer, **config["params"])
    schedule.step()
    assert (schedule.get_mom() is not None) == bool(flags)
    assert (optimizer.param_groups[0]["betas"][0] == 0.7) != bool(flags)


def test_what_the_helpers_refuse() -> None:
    assert lr_schedules.get_config_from_args(_parse())[0] is None
    assert "Foo" in (lr_schedules.get_config_from_args(_parse("--lr_schedule", "Foo"))[1] or "")
