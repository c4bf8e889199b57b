"""Frozen weights in 8 bits with trained adapters: they stay what they are in a 16-bit model, as upstream's do."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from tests.pool import distributed

WIDTH = 16
EIGHT_BITS = torch.float8_e4m3fn


class Quantized(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        values = torch.randint(-100, 100, (WIDTH, WIDTH), generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(values.to(EIGHT_BITS), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.tensor([0.01]), requires_grad=False)
        self.register_buffer("levels", torch.arange(WIDTH).to(EIGHT_BITS))
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        weight = self.weight.to(values.dtype) * self.weight_scale_inv.to(values.dtype)
        return F.linear(values, weight) + self.up(self.down(values)) + self.levels.to(values.dtype)


def model(seed: int) -> nn.Module:
    return nn.Sequential(Quantized(seed), nn.Tanh(), Quantized(seed + 1))


def losses(stage: int, within: bool, folder: Path, **zero: Any) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "data_types": {"buffer_dtype": "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config) if within else nullcontext():
        module = model(dist.get_rank())  # rank 0's values are everyone's
    trained = [param for param in module.parameters() if param.requires_grad]
    engine = deepspeed.initialize(model=module, config=config, model_parameters=trained)[0]

    first = module[0]
    assert (first.weight.dtype, first.levels.dtype) == (EIGHT_BITS, EIGHT_BITS)
    assert first.down.weight.dtype == torch.bfloat16
    with deepspeed.zero.GatheredParameters([first.weight]) if stage == 3 else nullcontext():
        assert torch.equal(first.weight.view(torch.uint8), model(0)[0].weight.view(torch.uint8))

    found = []
    for step in range(3):
        if step == 2:
            engine.save_checkpoint(str(folder))
            engine.load_checkpoint(str(folder))
        generator = torch.Generator().manual_seed(step)
        loss = engine(torch.randn(2, WIDTH, generator=generator).bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


@distributed(world_size=2)
def test_weights_in_8_bits_stay(tmp_path: Path) -> None:
    expected = losses(0, False, tmp_path / "0")
    for stage, within in ((1, False), (2, False), (3, False), (3, True)):
        assert losses(stage, within, tmp_path / f"{stage}{within}") == expected, (stage, within)


@distributed(world_size=1)
def test_weights_in_8_bits_are_offloaded(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    expected = losses(0, False, tmp_path / "0")
    for number, place in enumerate(({"device": "cpu"}, disk)):
        found = losses(3, True, tmp_path / f"at {number}", offload_param=place, offload_optimizer=place)
        assert found == expected, place
