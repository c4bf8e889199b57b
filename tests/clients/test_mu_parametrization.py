"""Learning rates per width: our optimizers over the groups of the mup package, against torch's over the same."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.zero.optimizer_registry import build_optimizer
from tests.pool import distributed


def _model(width: int) -> nn.Module:
    mup = pytest.importorskip("mup")
    torch.manual_seed(width)
    layers = nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), mup.MuReadout(width, 3)
    return nn.Sequential(*layers)


def _with_base_shapes() -> nn.Module:
    mup = pytest.importorskip("mup")
    model = _model(32)
    mup.set_base_shapes(model, _model(8), delta=_model(12))
    return model


CASES = [
    ("MuAdam", {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}),
    ("MuAdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    ("MuSGD", {"lr": 1e-2, "momentum": 0.9}),
]


def _losses(step: Any, model: nn.Module, forward: Any) -> list[float]:
    torch.manual_seed(7)
    losses = []
    for _ in range(5):
        loss = forward(torch.randn(8, 6)).square().mean()
        losses.append(loss.item())
        step(loss)
    return losses


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=2)
def test_equal_to_torch_over_the_groups_of_mup(name: str, settings: dict[str, Any], stage: int) -> None:
    mup = pytest.importorskip("mup")
    model = _with_base_shapes()
    optimizer = getattr(mup, name)(model.parameters(), **settings)

    def by_torch(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    wanted = _losses(by_torch, model, model)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": name, "params": settings},
        "zero_optimization": {"stage": stage},
    }
    other = _with_base_shapes()
    engine, *_ = deepspeed.initialize(model=other, model_parameters=other.parameters(), config=config)
    assert len({group["lr"] for group in engine.optimizer.param_groups}) > 1

    def by_engine(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    assert _losses(by_engine, other, engine) == pytest.approx(wanted, rel=1e-5)


def test_a_model_without_base_shapes_is_refused() -> None:
    pytest.importorskip("mup")
    with pytest.raises(DeepSpeedConfigError, match=r"(?s)MuAdam.*set_base_shapes"):
        build_optimizer("MuAdam", {"lr": 1e-3}, _model(8).parameters())


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mup", None)
    with pytest.raises(DeepSpeedConfigError, match="pip install mup"):
        build_optimizer("MuSGD", {"lr": 1e-3}, nn.Linear(4, 4).parameters())
