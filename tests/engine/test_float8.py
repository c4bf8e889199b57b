"""The section ``fp8``: which layers it changes, the same training at every stage, checkpoints, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.ops.float8 import float8_linear
from deepspeed.transforms import TransformError
from tests.pool import distributed

WIDTH, WORDS = 32, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.odd = nn.Linear(WIDTH, 3)
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.lm_head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return loss + 0.01 * self.odd(x).square().mean()


class Oracle(Model):
    """The same with the products written out."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            for layer in block.children():
                assert isinstance(layer, nn.Linear)
                layer.forward = lambda x, own=layer: float8_linear(x, own.weight, own.bias, emulate=True)  # type: ignore[method-assign]


def batch(step: int) -> Tensor:
    return torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(step % 3))


def start(stage: int, fp8: dict[str, Any] | None = None, **sections: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "fp8": {"enabled": True, "emulate": True} if fp8 is None else fp8,
        **sections,
    }
    return deepspeed.initialize(model=Model(), config=config)[0]


def train(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def by_torch(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(steps):
        loss = model(batch(step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_each_stage_trains_as_one_process(stage: int, tmp_path: Any) -> None:
    torch.manual_seed(0)
    expected = by_torch(Oracle(), 6)
    engine = start(stage)
    assert train(engine, 0, 4) == pytest.approx(expected[:4], rel=1e-4)
    report = next(r for r in engine.module_transforms.reports if r.name == "fp8")
    assert "4 of 6 linear layers" in str(report)
    engine.save_checkpoint(str(tmp_path))
    other = start(stage)
    other.load_checkpoint(str(tmp_path))
    assert train(other, 4, 2) == pytest.approx(expected[4:], rel=1e-4)
    engine.destroy()
    other.destroy()


@distributed(world_size=1)
def test_the_loss_is_near_that_of_bf16() -> None:
    bf16 = {"bf16": {"enabled": True}}
    plain, narrow = start(1, {}, **bf16), start(1, **bf16)
    expected, found = train(plain, 0, 30), train(narrow, 0, 30)
    assert found != expected and expected[-1] < 0.6 * expected[0]
    assert found[-1] == pytest.approx(expected[-1], rel=0.03)
    plain.destroy()
    narrow.destroy()


@distributed(world_size=1)
def test_names_and_weights_stay_and_exports_are_plain(tmp_path: Any) -> None:
    torch.manual_seed(0)
    plain = Model().state_dict()
    engine = start(3)
    state = engine._zero3_consolidated_16bit_state_dict()
    assert list(state) == list(plain) and all(torch.equal(state[name], plain[name]) for name in plain)
    Model().load_state_dict(state)
    engine.destroy()


@distributed(world_size=1)
def test_what_cannot_be_is_refused_with_a_remedy() -> None:
    with pytest.raises(TransformError, match=r"fp8.enabled: a CPU does not support .* fp8.emulate: true"):
        start(1, {"enabled": True})
    with pytest.raises(TransformError, match=r"none of the model's 6 linear layers .* fp8.exclude"):
        start(1, {"enabled": True, "emulate": True, "exclude": ["blocks", "lm_head"]})
    with pytest.raises(DeepSpeedConfigError, match="did you mean 'fp8.emulate'"):
        start(1, {"enabled": True, "emulated": True})
