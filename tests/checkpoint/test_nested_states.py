"""Models with their own code for saving and loading nested dicts, as under Megatron-LM's scripts, which replace
``state_dict`` while the engine saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.checkpoint.errors import CheckpointError
from tests.pool import distributed

WIDTH = 4
APART = "apart.weight"
"""A weight outside the dicts, under a name other than the module's, as for experts there."""


class Nested(nn.Module):
    def __init__(self, seed: int, more: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.bias.requires_grad_(not more)
        self.register_buffer("scale", torch.full((1,), float(seed if more else 1)), persistent=more)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        layers = {name: layer.state_dict(keep_vars=keep_vars) for name, layer in self.named_children()}
        apart = {APART: layers["second"].pop("weight")}
        return {**apart, "model": {"layers": layers, "scale": self.scale}}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
        layers = {name: dict(saved) for name, saved in state_dict["model"]["layers"].items()}
        layers["second"]["weight"] = state_dict[APART]
        for name, layer in self.named_children():
            layer.load_state_dict(layers[name], strict=strict)
        self.scale.copy_(state_dict["model"]["scale"])


def engine_of(stage: int, seed: int, more: bool = True) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed.initialize(model=Nested(seed, more), config=config)[0]


def train(engine: Any) -> float:
    loss = engine(torch.ones(1, WIDTH)).float().square().sum()
    engine.backward(loss)
    engine.step()
    return loss.item()


def save(engine: Any, folder: Any) -> None:
    """As Megatron's script does it."""
    module, own = engine.module, engine.module.state_dict
    module.state_dict = lambda destination=None, prefix="", keep_vars=False: (
        module.state_dict_for_save_checkpoint(prefix=prefix, keep_vars=keep_vars)
    )
    engine.save_checkpoint(folder)
    module.state_dict = own


@pytest.mark.parametrize(("stage", "other"), [(0, 0), (1, 2), (3, 3), (2, 3), (3, 1)])
@distributed(world_size=2)
def test_training_continues(tmp_path: Any, stage: int, other: int) -> None:
    more = 3 not in (
        stage,
        other,
    )  # a frozen weight and a buffer: at stage 3 the model's own code loads nothing
    engine = engine_of(stage, 1, more)
    train(engine)
    save(engine, tmp_path)
    expected = [train(engine) for _ in range(2)]
    resumed = engine_of(other, 2, more)
    resumed.load_checkpoint(tmp_path)
    assert resumed.module.scale.item() == 1
    assert [train(resumed) for _ in range(2)] == pytest.approx(expected, rel=1e-2)
    for each in (engine, resumed):
        each.destroy()


@distributed(world_size=1)
def test_weights_alone_and_the_layout_of_the_file(tmp_path: Any) -> None:
    engine = engine_of(1, 1)
    train(engine)
    save(engine, tmp_path)
    saved = torch.load(tmp_path / "global_step1/mp_rank_00_model_states.pt")["module"]
    assert set(saved) == {"model", APART} and set(saved["model"]["layers"]) == {"first", "second"}
    other = engine_of(1, 2)
    other.load_checkpoint(tmp_path, load_module_only=True)
    for ours, loaded in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(ours, loaded)
    for each in (engine, other):
        each.destroy()


@distributed(world_size=1)
def test_a_model_without_a_loader_of_its_own_is_told_what_differs(tmp_path: Any) -> None:
    engine = engine_of(0, 1)
    save(engine, tmp_path)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}}
    plain = deepspeed.initialize(model=nn.Linear(WIDTH, WIDTH), config=config)[0]
    with pytest.raises(CheckpointError, match="not in the model"):
        plain.load_checkpoint(tmp_path)
    for each in (engine, plain):
        each.destroy()
