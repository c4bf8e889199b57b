"""The section ``native_products``: which layers it changes, the same training at every stage, exports, generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.ops import native
from deepspeed.ops.transformer import products
from deepspeed.ops.transformer.products import NativeLinear
from deepspeed.transforms import ModuleTransform, TransformError, request
from tests.pool import distributed

pytestmark = pytest.mark.skipif(native.library() is None, reason="built without native kernels")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.first(x))) - x.flip(-1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step % 3))


def start(monkeypatch: pytest.MonkeyPatch, stage: int, model: nn.Module, **sections: Any) -> Any:
    """An engine on a processor where native products are faster, at any size."""
    monkeypatch.setattr(products, "is_faster", lambda: True)
    monkeypatch.setattr("deepspeed.transforms.native_linears.is_faster", lambda: True)
    monkeypatch.setattr(products, "_WORTHWHILE", 0)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "native_products": {"enabled": True},
        **sections,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
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
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_each_stage_trains_as_one_process(stage: int) -> None:
    torch.manual_seed(0)
    model, other = Model(), Model()
    other.load_state_dict(model.state_dict())
    expected = by_torch(other, 6)
    counted = []
    product = products.product
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "product", lambda *given: (counted.append(1), product(*given))[1])
        engine = start(patch, stage, model)
        assert train(engine, 6) == pytest.approx(expected, rel=1e-4)
    assert len(counted) == 6 * 5  # two forwards, two weights, and the second layer's input
    report = next(each for each in engine.module_transforms.reports if each.name == "native_products")
    assert "2 linear layers" in str(report)
    engine.destroy()


@distributed(world_size=1)
def test_names_stay_and_other_dtypes_are_torchs(tmp_path: Any) -> None:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        engine = start(patch, 1, Model(), bf16={"enabled": True})
        patch.setattr(products, "product", None)  # never called
        train(engine, 2)
    assert type(engine.module.first) is NativeLinear
    assert list(engine.module.state_dict()) == list(Model().state_dict())
    engine.save_checkpoint(str(tmp_path))
    plain = deepspeed.initialize(
        model=Model(),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 1},
        },
    )[0]
    plain.load_checkpoint(str(tmp_path))
    assert torch.equal(plain.module.first.weight, engine.module.first.weight)
    plain.destroy()
    engine.destroy()


@distributed(world_size=1)
def test_where_torchs_are_as_fast_nothing_changes() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.transforms.native_linears.is_faster", lambda: False)
        config = {
            "train_batch_size": 8,
            "optimizer": {"type": "Adam"},
            "native_products": {"enabled": True},
        }
        engine: Any = deepspeed.initialize(model=Model(), config=config)[0]
    assert type(engine.module.first) is nn.Linear
    engine.destroy()


@distributed(world_size=1)
def test_a_transform_that_fails_leaves_plain_layers() -> None:
    class Fails:
        name = "fails"
        after, before = ("native_products",), ()

        def apply(self, module: nn.Module, context: Any) -> None:
            assert type(module.first) is NativeLinear
            raise RuntimeError("no")

    model = Model()
    failing: ModuleTransform = Fails()
    request(model, failing)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TransformError, match="'fails' failed"):
        start(patch, 1, model)
    assert type(model.first) is nn.Linear
