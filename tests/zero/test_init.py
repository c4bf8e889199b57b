"""zero.Init: the configs it takes, and what may be done to modules built under it."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from tests.pool import distributed

SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
HJSON = """{
  # brain floats
  train_micro_batch_size_per_gpu: 2
  bf16: {enabled: true}
  zero_optimization: {stage: 3}
}"""


def as_written(kind: str, folder: Path) -> Any:
    text = json.dumps(SETTINGS)
    if kind == "base64":
        return base64.urlsafe_b64encode(text.encode()).decode()
    if kind == "dict":
        return SETTINGS
    path = folder / f"config.{kind}"
    path.write_text(HJSON if kind == "hjson" else text)
    return path if kind == "hjson" else str(path)


@pytest.mark.parametrize("argument", ["config", "config_dict_or_path"])
@pytest.mark.parametrize("kind", ["dict", "json", "hjson", "base64"])
@distributed(world_size=1)
def test_it_takes_what_initialize_takes(tmp_path: Path, kind: str, argument: str) -> None:
    if kind == "hjson":
        pytest.importorskip("hjson")
    written = as_written(kind, tmp_path)
    with deepspeed.zero.Init(**{argument: written}):
        model = nn.Linear(4, 4)
    assert model.weight.dtype is torch.bfloat16
    engine, *_ = deepspeed.initialize(model=model, config=written)
    engine.destroy()


@pytest.mark.parametrize("config", ["missing.json", '{"bf16": '])
@distributed(world_size=1)
def test_a_config_that_cannot_be_read(tmp_path: Path, config: str) -> None:
    if config.startswith("{"):
        (tmp_path / "broken.json").write_text(config)
        config = str(tmp_path / "broken.json")
    before = nn.Linear.__init__
    with pytest.raises(DeepSpeedConfigError, match=r"zero\.Init.*(missing|broken)\.json"):
        deepspeed.zero.Init(config_dict_or_path=config)
    assert nn.Linear.__init__ is before


def make_encoder() -> nn.Module:
    """`nn.TransformerEncoder` makes its layers by deepcopy."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def assert_same_values(model: nn.Module, expected: nn.Module) -> None:
    for (name, param), (_, value) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert param.shape == (0,), name
        with deepspeed.zero.GatheredParameters(param):
            assert param.dtype == value.dtype and torch.equal(param, value), name
        assert param.requires_grad == value.requires_grad


@pytest.mark.parametrize("cast", ["double", "half", "bfloat16", "float", "to"])
@distributed(world_size=[1, 2])
def test_casting_a_module_that_is_cut(world_size: int, cast: str) -> None:
    def apply(model: nn.Module) -> nn.Module:
        return model.to(torch.float64) if cast == "to" else getattr(model, cast)()

    torch.manual_seed(0)
    with deepspeed.zero.Init():
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
        inside = apply(nn.Linear(3, 5))
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    expected_inside = apply(nn.Linear(3, 5))
    assert_same_values(inside, expected_inside)
    apply(model)
    apply(expected)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(model[0].bias, modifier_rank=0):
        model[0].bias.fill_(1 / 3)  # more digits than the shard had before the cast
    with torch.no_grad():
        expected[0].bias.fill_(1 / 3)
    assert_same_values(model, expected)
    apply(model)
    assert_same_values(model, expected)
    model.float()
    expected.float()
    assert_same_values(model, expected)
    assert model[0].bias.ds_tensor.dtype is torch.float32


@distributed(world_size=2)
def test_training_in_double() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 0.0,
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init():
        model = nn.Linear(5, 3).double()
    torch.manual_seed(0)
    plain = nn.Linear(5, 3).double()
    engine, *_ = deepspeed.initialize(
        model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(4, 5, dtype=torch.float64)
    for _ in range(3):
        engine.backward(engine(x).square().mean())
        engine.step()
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.destroy()
    torch.testing.assert_close(engine.module.weight, plain.weight, rtol=1e-14, atol=0)


@distributed(world_size=2)
def test_composites_of_torch_initialize_their_children() -> None:
    class Own(nn.MultiheadAttention):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.more = nn.Linear(4, 4)
            assert self.more.weight.shape == (0,) and self.out_proj.weight.shape == (4, 4)

    def make() -> nn.Module:
        return nn.ModuleList([nn.Transformer(4, 2, 2, 1, 8), nn.MultiheadAttention(4, 2), nn.LSTM(3, 2)])

    torch.manual_seed(0)
    with deepspeed.zero.Init():
        model = make()
        assert all(param.shape == (0,) for param in Own().parameters())
    torch.manual_seed(0)
    assert_same_values(model, make())


@distributed(world_size=[1, 2])
def test_modules_made_by_deepcopy(world_size: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 0.0,
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make_encoder()
    torch.manual_seed(0)
    plain = make_encoder()
    ids = [param.ds_id for param in model.parameters()]
    assert len(set(ids)) == len(ids) == len(list(plain.parameters()))
    assert_same_values(model, plain)
    model.layers[0].linear1.bias.requires_grad_(False)
    plain.layers[0].linear1.bias.requires_grad_(False)
    twin = copy.deepcopy(model)  # after the context, too: a reference model
    assert_same_values(twin, plain)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(twin.parameters()), modifier_rank=0):
        for param in twin.parameters():
            param.zero_()
    assert_same_values(model, plain)  # nothing is shared
    engine, *_ = deepspeed.initialize(
        model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(2, 4, 8)
    for _ in range(3):
        loss, expected = engine(x).square().sum(), plain(x).square().sum()
        torch.testing.assert_close(loss, expected)
        engine.backward(loss)
        engine.step()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(engine.eval()(x), plain.eval()(x))
    engine.destroy()


@distributed(world_size=2)
def test_tied_parameters_stay_tied_in_a_copy() -> None:
    with deepspeed.zero.Init():
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight and twin[0].weight is not model[0].weight
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        whole = copy.deepcopy(model)  # whole parameters are copied whole
    assert not hasattr(whole[0].weight, "ds_id") and whole[0].weight.shape == (4, 4)
    assert whole[0].weight is whole[1].weight


def two_layers(**settings: Any) -> nn.Module:
    torch.manual_seed(5)
    with deepspeed.zero.Init(config_dict_or_path=SETTINGS, dtype=torch.float32, **settings):
        return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))


@pytest.mark.parametrize(("stage", "settings"), [(0, {}), (1, {"remote_device": "cpu"}), (2, {})])
@distributed(world_size=2)
def test_an_engine_that_gathers_nothing_makes_it_whole(stage: int, settings: dict[str, Any]) -> None:
    x, updated = torch.ones(2, 5), []
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    for partitioned in (True, False):
        model = two_layers(enabled=partitioned, **settings)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        engine.backward(engine(x).mean())
        engine.step()
        updated.append([param.detach().clone() for param in model.parameters()])
        engine.destroy()
    assert [param.shape for param in updated[0]] == [(3, 5), (3,), (1, 3), (1,)]
    assert all(torch.equal(one, other) for one, other in zip(*updated, strict=True))


@distributed(world_size=2)
def test_inference_makes_it_whole() -> None:
    x = torch.ones(2, 5)
    engine = deepspeed.init_inference(two_layers(), dtype=torch.float32)
    assert torch.equal(engine(x), two_layers(enabled=False)(x))
