"""Layers with low-rank adapters, split over ranks, compute what the whole ones do."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.comm.collectives import communicator
from deepspeed.linear import LoRAConfig, OptimizedLinear, QuantizationConfig, merged_state_dict
from deepspeed.parallel.tensor.apply import apply_plan
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from deepspeed.parallel.tensor.low_rank import LoRAColumns
from deepspeed.parallel.tensor.planning.planner import plan_module
from deepspeed.transforms.errors import TransformRefusedError
from deepspeed.transforms.lora.optimized_linear import LoRAOptimizedLinear
from tests.parallel.tensor.test_layers import own_part
from tests.pool import distributed


class Feed(nn.Module):
    def __init__(self, quantization: QuantizationConfig | None = None, *, delayed: bool = False) -> None:
        super().__init__()
        config = LoRAConfig(lora_r=2, lora_alpha=6, delay_lora_init=delayed)
        self.up = OptimizedLinear(8, 20, True, config, quantization, dtype=torch.float32)
        self.down = OptimizedLinear(20, 8, True, config, quantization, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def split(module: nn.Module) -> nn.Module:
    plan = plan_module(module, 2, inputs={"x": torch.empty(3, 8, device="meta")})
    apply_plan(module, plan, communicator(dist.group.WORLD), lambda old, new: None)
    return module


@pytest.mark.parametrize("disabled", [False, True])
@distributed(world_size=2)
def test_split_adapters_compute_like_whole_ones(disabled: bool) -> None:
    torch.manual_seed(0)
    whole = Feed(delayed=disabled)
    for layer in (whole.up, whole.down):
        if disabled:
            layer.disable()
        else:
            nn.init.normal_(layer.lora_weight_2.weight)
    parts = split(copy.deepcopy(whole))
    assert isinstance(parts.up, LinearLayer) and isinstance(parts.down, LinearAllreduce)
    assert isinstance(parts.up, LoRAOptimizedLinear) and list(parts.state_dict()) == list(whole.state_dict())
    x, y = torch.randn(2, 3, 8, requires_grad=True).unbind()
    for each in (whole, parts):
        (each(x) * y).sum().backward()
    torch.testing.assert_close(parts(x), whole(x))
    trained = [(p, q) for p, q in zip(parts.parameters(), whole.parameters(), strict=True) if q.requires_grad]
    assert len(trained) == (0 if disabled else 4)
    for part, reference in trained:
        torch.testing.assert_close(part.grad, own_part(reference.grad, part))
    for part, reference in zip((parts.up, parts.down), (whole.up, whole.down), strict=True):
        torch.testing.assert_close(part.merged_weight(), own_part(reference.merged_weight(), part.weight))
    with pytest.raises(ValueError, match="weights such as up.weight are split over"):
        merged_state_dict(parts)


@distributed(world_size=2)
def test_what_cannot_be_split_says_why() -> None:
    quantized = Feed(QuantizationConfig(group_size=16))
    with pytest.raises(ValueError, match="quantized weight of LoRAOptimizedLinear .* ZeRO stage 3"):
        LoRAColumns(quantized.up, communicator(dist.group.WORLD))
    given = {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(
        TransformRefusedError, match="quantized weight of LoRAOptimizedLinear .* ZeRO stage 3"
    ):
        deepspeed.initialize(model=quantized, config=given)
    with pytest.raises(ValueError, match=r"only after init_lora\(\)"):
        split(Feed(delayed=True))
