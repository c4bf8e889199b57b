"""Batch norm in 16-bit models, against the same model in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from tests.pool import distributed

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FrozenNorm(nn.Module):
    """As in torchvision and in detection models: everything is a buffer."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.5), ("bias", 0.25), ("running_mean", 0.5), ("running_var", 2.0)):
            self.register_buffer(name, torch.full((width,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale.view(-1, 1, 1) + (self.bias - self.running_mean * scale).view(-1, 1, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6)
        self.second, self.frozen = nn.Conv2d(6, 4, 3), FrozenNorm(4)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.plain = nn.BatchNorm2d(4, affine=False)
        self.last = nn.Conv2d(4, 3, 1)
        self.register_buffer("frequencies", torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return self.last(self.plain(self.instance(self.frozen(self.second(x))))).float()


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> Tensor:
    return torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(step + 50 * dist.get_rank()))


def mixed(model: Net, dtype: torch.dtype) -> Net:
    """Train as with torch: 16 bits, with fp32 norms that have statistics."""
    model = model.to(dtype)
    for norm in (model.norm, model.instance, model.plain):
        norm.float()
    return model


def start(precision: str, stage: int, init: bool = False, **config: Any) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        precision: {"enabled": True, **({"loss_scale": 16} if precision == "fp16" else {})},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **config,
    }
    if init:
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.float32):
            model = Net()
    else:
        model = make()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), config=settings
    )
    return engine


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", LOW)
@distributed(world_size=2)
def test_training_as_in_torch(precision: str, stage: int) -> None:
    engine = start(precision, stage, init=stage == 3)
    dtype = LOW[precision]
    master = make()
    optimizer = torch.optim.SGD(master.parameters(), lr=0.05)
    low = mixed(copy.deepcopy(master), dtype)
    for step in range(4):
        x = batch(step)
        loss, expected = engine(x).square().mean(), low(x.to(dtype)).square().mean()
        torch.testing.assert_close(
            loss, expected, rtol=0 if step == 0 else 2e-2, atol=0 if step == 0 else 1e-3
        )
        engine.backward(loss)
        engine.step()
        expected.backward()
        for wide, narrow in zip(master.parameters(), low.parameters(), strict=True):
            wide.grad = narrow.grad.float()
            dist.all_reduce(wide.grad)
            wide.grad /= 2
        optimizer.step()
        low.zero_grad()
        with torch.no_grad():
            for wide, narrow in zip(master.parameters(), low.parameters(), strict=True):
                narrow.copy_(wide)
    for name, buffer in engine.module.named_buffers():
        expected_buffer = low.get_buffer(name)
        assert buffer.dtype == (torch.float32 if name == "frequencies" else expected_buffer.dtype), name
        torch.testing.assert_close(buffer.float(), expected_buffer.float(), rtol=2e-2, atol=2e-2)
    engine.eval()
    low.eval()
    with torch.no_grad():
        torch.testing.assert_close(engine(batch(9)), low(batch(9).to(dtype)), rtol=5e-2, atol=5e-2)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=1)
def test_the_whole_norm_in_16_bits_where_that_is_asked_for(stage: int) -> None:
    """`model.bfloat16()` of torch, bit for bit."""
    engine = start("bf16", stage, data_types={"buffer_dtype": "bf16"})
    plain = make().bfloat16()
    for step in range(3):
        x = batch(step)
        assert torch.equal(engine(x), plain(x.bfloat16()))
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name
    engine.destroy()


@distributed(world_size=1)
def test_fp32_models_are_left_alone() -> None:
    model = make()
    before = {name: (tensor.dtype, tensor.clone()) for name, tensor in model.state_dict().items()}
    engine, *_ = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 4})
    for name, tensor in engine.module.state_dict().items():
        assert tensor.dtype == before[name][0] and torch.equal(tensor, before[name][1])
    engine.destroy()
