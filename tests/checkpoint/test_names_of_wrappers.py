"""``torch.compile`` and ``DataParallel`` put parts into names that no checkpoint depends on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.tools.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from tests.checkpoint.models import assert_equal
from tests.pool import distributed


class Holder(nn.Module):
    """A model of the user's whose names do begin with ``module.``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Compiled(nn.Module):
    """With the names of ``torch.compile(module)``, which changes torch for the rest of the process."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(x)


def wrapped(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    if kind == "compiled":
        return Compiled(net)
    if kind == "compiled inside":
        net[2] = Compiled(net[2])
    return {"data parallel": nn.DataParallel, "holder": Holder}.get(kind, lambda net: net)(net)


def start(kind: str, stage: int, seed: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=wrapped(kind, seed), config=config)[0]


def states(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and moments by place: the names differ."""
    shards = enumerate(tensors for _, tensors in engine.state_access.shards())
    return {f"{number}/{kind}": tensor for number, tensors in shards for kind, tensor in tensors.items()}


def without_wrappers(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("_orig_mod.", "").removeprefix("module."): value for name, value in named.items()}


KINDS = ("plain", "compiled", "compiled inside", "data parallel", "holder")


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=1)
def test_both_directions_and_exports(stage, tmp_path):
    plain = set(wrapped("plain", 0).state_dict())
    for number, kind in enumerate(KINDS):
        folder = tmp_path / str(number)
        engine = start(kind, stage, 0)
        engine.backward(engine(torch.randn(4, 4)).square().mean())
        engine.step()
        engine.save_checkpoint(folder, tag="t")
        exported = get_fp32_state_dict_from_zero_checkpoint(folder, "t")
        assert set(exported) == (plain if kind != "holder" else {f"module.{name}" for name in plain})
        if stage < 3:
            engine.save_16bit_model(folder, "weights.bin")
            assert torch.load(folder / "weights.bin").keys() == exported.keys()
        for other in KINDS:
            target = start(other, stage, 5)
            target.load_checkpoint(folder, tag="t")
            assert_equal(states(target), states(engine))
            loaded = load_state_dict_from_zero_checkpoint(wrapped(other, 6), folder, "t").state_dict()
            assert_equal(without_wrappers(loaded), without_wrappers(exported))


@distributed(world_size=1)
def test_plain_weights(tmp_path):
    weights = wrapped("plain", 0).state_dict()
    torch.save({f"module._orig_mod.{name}": value for name, value in weights.items()}, tmp_path / "w.bin")
    for kind in KINDS:
        engine = start(kind, 1, 5)
        engine.load_checkpoint(tmp_path / "w.bin")
        found = engine.module.state_dict().values()
        assert all(torch.equal(a, b) for a, b in zip(found, weights.values(), strict=True))
