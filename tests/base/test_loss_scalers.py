"""The documented loss scalers, against the scale that an engine's own goes through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.compat.fp16 import loss_scaler as documented
from deepspeed.config.plan import LossScalePlan
from deepspeed.config.sections.precision import DeepSpeedFP16Config
from deepspeed.optim import loss_scaler as core

ARGS = {
    "init_scale": 64.0,
    "scale_window": 2,
    "delayed_shift": 2,
    "consecutive_hysteresis": False,
    "min_scale": 8.0,
}


def test_a_dynamic_scaler_goes_the_way_of_the_engines_own() -> None:
    scaler = documented.CreateLossScaler(torch.half, 0, True, ARGS)
    assert isinstance(scaler, documented.DynamicLossScaler)
    plan = LossScalePlan(static=None, initial=64.0, window=2, hysteresis=2, minimum=8.0)
    engines = core.LossScaler(plan)
    for overflow in (False, False, False, True, True, True, False, False, False):
        scaler.update_scale(overflow)
        engines.update(overflow)
        assert scaler.loss_scale == scaler.cur_scale == engines.scale
    for each in (scaler, engines):
        assert isinstance(each, documented.LossScalerBase)
    with pytest.raises(core.LossScaleError, match="minimum"):
        for _ in range(20):
            scaler.update_scale(True)


def test_overflows_are_found_and_losses_scaled() -> None:
    scaler = documented.DynamicLossScaler(4.0, 10, 1.0, 1, False, raise_error_at_min_scale=False)
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    assert not scaler.has_overflow_serial([weight])
    scaler.backward((weight * torch.tensor([1.0, 3.0])).sum())
    assert weight.grad is not None and weight.grad.tolist() == [4.0, 12.0]
    weight.grad[1] = float("nan")
    assert scaler.has_overflow([weight]) is True
    for _ in range(9):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1.0
    fixed = documented.LossScaler(3)
    fixed.update_scale(True)
    assert fixed.scale_gradient(None, (torch.ones(1),), ()) == (torch.tensor([3.0]),)
    assert not fixed.has_overflow([weight]) and not fixed.dynamic


def test_what_the_scale_of_a_config_is() -> None:
    section = DeepSpeedFP16Config(enabled=True, initial_scale_power=5, loss_scale_window=7, hysteresis=3)
    args = section.dynamic_loss_scale_args()
    config = documented.LossScaleConfig(torch.float16, True, 0, args)
    assert (config.cur_scale, config.scale_window, config.cur_hysteresis) == (32.0, 7, 3)
    assert documented.LossScaleConfig(torch.bfloat16, True, 0, args).cur_scale == 1.0
    assert documented.LossScaleConfig(torch.float16, False, 128.0, None).cur_scale == 128.0
    profiles = documented.LossScaleProfile
    unfused = documented.LossScaleConfig(torch.float16, True, 0, None, profile=profiles.UNFUSED)
    assert (unfused.cur_scale, unfused.min_loss_scale) == (2.0**16, 0.25)
    given = documented.LossScaleConfig(
        torch.float16, True, 0, None, profile=profiles.FUSED, initial_dynamic_scale=8.0
    )
    assert (given.cur_scale, given.min_loss_scale) == (8.0, 1.0)
    assert documented.CreateLossScaler(torch.bfloat16, 0, True, None).loss_scale == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_scale": float("inf")}, r"dynamic_loss_args\['init_scale'\] must be finite"),
        ({"min_scale": 0}, "greater than 0"),
        ({"scale_window": 1.5}, "positive integer"),
        ({"window": 3}, "has the keys .*; expected"),
    ],
)
def test_values_that_cannot_be_used(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        documented.CreateLossScaler(torch.half, 0, True, {**ARGS, **changes})
    with pytest.raises(ValueError, match=r"fp16\.loss_scale must be finite"):
        documented.LossScaleConfig(torch.half, False, float("nan"), None)
