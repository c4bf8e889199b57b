"""Optimizer state comes back as it was, also where there was none: not every optimizer starts from zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.zero.tensor_fragment import safe_get_full_optimizer_state
from tests.checkpoint.models import assert_equal
from tests.pool import distributed, run

ELEMENTWISE = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "dampening": 0.5},
    "Adagrad": {"initial_accumulator_value": 0.3},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


class Eager(torch.optim.Optimizer):
    """Its step relies on state that its constructor makes, and that is not zero (older releases of torch's Adagrad)."""

    def __init__(self, params: Any, lr: float = 0.1, start: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "start": start})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p, group["start"])}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] += 1
                    state["sum"] += p.grad.square()
                    p -= group["lr"] / state["step"] * p.grad / state["sum"].sqrt()


class Late(nn.Module):
    """``late`` takes part only when asked to; a scalar, and a size that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(6, 5)
        self.late = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, late: bool) -> Tensor:
        hidden = torch.tanh(self.early(x)) * self.scale
        return self.late(hidden).square().mean() if late else hidden.square().mean()


def make_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    if name == "Eager":
        return Eager(params)
    return getattr(torch.optim, name)(params, lr=0.05, **OPTIONS.get(name, {}))


def make(name: str, stage: int, *, seed: int = 0, init: bool = False, **config: Any) -> Any:
    torch.manual_seed(seed)
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}, **config}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=init):
        model = Late()
    optimizer = make_optimizer(name, model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(engine: Any, first: int, last: int, *, late: bool) -> None:
    """The same data on every rank, so that their number does not matter."""
    for number in range(first, last):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(x, late))
        engine.step()


def whole(engine: Any) -> dict[str, Tensor]:
    params = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values())):
        return {name: param.detach().clone() for name, param in params.items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_resume_before_the_first_gradient(tmp_path, stage):
    for number, name in enumerate([*ELEMENTWISE, "Eager"]):
        engine = make(name, stage)
        train(engine, 0, 3, late=False)
        folder = str(tmp_path / name)
        engine.save_checkpoint(folder)
        train(engine, 3, 6, late=True)
        fresh, used = make(name, stage, seed=1), make(name, stage, seed=1)
        train(used, 0, 2, late=True)  # what it has learned is forgotten
        for at, resumed in enumerate(
            (fresh, used)
        ):  # each optimizer at two stages of four with the other option
            resumed.load_checkpoint(folder, load_module_strict=(number + stage + at) % 2 == 0)
            train(resumed, 3, 6, late=True)
            assert_equal(whole(resumed), whole(engine))


def _save_all(folder: str, stage: int) -> dict[str, dict[str, Tensor]]:
    expected = {}
    for name in [*ELEMENTWISE, "Eager"]:
        engine = make(name, stage)
        train(engine, 0, 3, late=False)
        engine.save_checkpoint(f"{folder}/{name}")
        train(engine, 3, 6, late=True)
        expected[name] = whole(engine)
    return expected


def _resume(names: list[str], folder: str, stage: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name in names:
        engine = make(name, stage, seed=1)
        engine.load_checkpoint(f"{folder}/{name}")
        train(engine, 3, 6, late=True)
        found[name] = whole(engine)
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_resume_on_another_number_of_ranks(tmp_path, stage):
    expected = run(_save_all, 2, folder=str(tmp_path), stage=stage)[0]
    for turn, (world, other) in enumerate(((1, stage), (4, 3 - stage))):  # either has half of the optimizers
        names = list(expected)[(stage + turn) % 2 :: 2]
        found = run(_resume, world, names=names, folder=str(tmp_path), stage=other)[0]
        for name in names:
            for key, value in expected[name].items():
                torch.testing.assert_close(found[name][key], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_looking_at_state_does_not_change_it(stage):
    for name in ["NAdam", "Rprop", "ASGD", "Adagrad", "SGD", "Eager"]:
        weights = []
        for look in (False, True):
            engine = make(name, stage, bf16={"enabled": True})
            train(engine, 0, 1, late=False)
            if look:
                key = {"NAdam": "exp_avg", "Rprop": "prev", "ASGD": "ax", "SGD": "momentum_buffer"}.get(name)
                state = safe_get_full_optimizer_state(engine.module.late.weight, key or "sum")
                assert state is not None and state.shape == (7, 5)
                assert state.unique().item() == pytest.approx({"Adagrad": 0.3, "Eager": 0.5}.get(name, 0.0))
            train(engine, 1, 4, late=True)
            weights.append(whole(engine))
        assert_equal(*weights)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
@distributed(world_size=2)
def test_state_of_the_constructor(precision):
    """State created by the constructor is cut like the weights, also under ``zero.Init`` and for a scalar."""
    for name in ("Adagrad", "Eager"):
        expected = None
        for stage, init in ((0, False), (1, False), (2, False), (3, False), (3, True)):
            if init:
                torch.manual_seed(0)
            engine = make(name, stage, init=init, **precision)
            if init:
                with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                    torch.manual_seed(0)
                    for mine, other in zip(engine.module.parameters(), Late().parameters(), strict=True):
                        mine.data.copy_(other)
            train(engine, 0, 3, late=True)
            found = whole(engine)
            expected = expected or found
            assert_equal(found, expected)
