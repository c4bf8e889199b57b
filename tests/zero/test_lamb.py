"""FusedLamb's own clipping: by the norm of the whole gradient, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.ops.lamb import FusedLamb
from tests.ops.cases import Lamb
from tests.pool import distributed

MAX_NORM = 0.05
STEPS = 4


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]


def loss_of(model: Any, step: int) -> torch.Tensor:
    return model(torch.randn(6, 5, generator=torch.Generator().manual_seed(step))).pow(2).sum()


def expected_weights(clips: tuple[bool, bool] = (True, True)) -> list[torch.Tensor]:
    """The LAMB of the paper after torch's clipping, in fp64."""
    model = make_model().double()
    optimizer = Lamb(groups_of(model), lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        model.zero_grad()
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step)).double()
        model(x).pow(2).sum().backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for group, clip in zip(optimizer.param_groups, clips, strict=True):
            for param in group["params"]:
                param.grad *= min(1.0, MAX_NORM / (norm + 1e-6)) if clip else 1.0
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def assert_near(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for param, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.detach().double(), value, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("clips", [(True, True), (True, False)])
def test_alone(clips: tuple[bool, bool]) -> None:
    model = make_model()
    groups = groups_of(model)
    for group, clip in zip(groups, clips, strict=True):
        group["max_grad_norm"] = MAX_NORM if clip else 0.0
    optimizer = FusedLamb(groups, lr=0.01, weight_decay=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        (loss := loss_of(model, next(steps))).backward()
        return loss

    steps = iter(range(STEPS))
    for _ in range(STEPS):
        assert optimizer.step(closure) > 0
    assert_near(model, expected_weights(clips))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@distributed(world_size=[1, 2, 4])
def test_at_every_stage(world_size: int, stage: int, precision: str) -> None:
    model = make_model()
    optimizer = FusedLamb(groups_of(model), lr=0.01, weight_decay=0.1, max_grad_norm=MAX_NORM)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    norms = []
    for step in range(STEPS):
        engine.backward(loss_of(engine, step))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert min(norms) > 2 * MAX_NORM  # every step clips
    moments = [
        deepspeed.utils.safe_get_full_optimizer_state(p, "exp_avg") for p in engine.module.parameters()
    ]
    # After clipping no gradient is longer than MAX_NORM, and neither is their moving average.
    length = torch.stack([m.float().norm() for m in moments]).norm()
    assert MAX_NORM / 30 < length < MAX_NORM
    if precision == "fp32":
        engine.destroy()
        assert_near(engine.module, expected_weights())
