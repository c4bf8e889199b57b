"""Gradients that arrive in several parts during one backward, as reentrant checkpointing makes them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.pool import distributed
from tests.zero.models import config_for

RATE = 0.05


class Shared(nn.Module):
    """One layer that several recomputed segments share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, segments: int) -> Tensor:
        for _ in range(segments):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.head(x).square().sum()


@pytest.mark.parametrize("stage", range(4))
@distributed(world_size=[1, 2])
def test_a_layer_of_several_segments(stage: int, world_size: int) -> None:
    """Its gradient is whole before the step, from the first backward on, also where the number of segments changes."""
    run(stage, [[2, 2, 3, 3, 2, 4]] * world_size)


@pytest.mark.parametrize("stage", range(4))
@distributed(world_size=2)
def test_ranks_with_different_numbers_of_segments(stage: int) -> None:
    run(stage, [[2, 2, 2, 3], [2, 3, 2, 2]])


def run(stage: int, segments_of_ranks: list[list[int]]) -> None:
    """Train with ``segments_of_ranks[rank][step]`` segments, and compare every gradient and weight with plain SGD."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = Shared()
    reference = copy.deepcopy(model)
    config = config_for(stage, clip=0.0) | {"optimizer": {"type": "SGD", "params": {"lr": RATE}}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    for step, segments in enumerate(segments_of_ranks[rank]):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(2, 6, generator=generator)
        engine.backward(engine(x.clone().requires_grad_(), segments))
        reference(x.clone().requires_grad_(), segments).backward()
        for param, other in zip(engine.module.parameters(), reference.parameters(), strict=True):
            assert other.grad is not None
            dist.all_reduce(other.grad)
            other.grad /= world_size
            torch.testing.assert_close(safe_get_full_grad(param), other.grad)
            if stage == 0:
                torch.testing.assert_close(param.grad, other.grad)
        engine.step()
        for param, other in zip(engine.module.parameters(), reference.parameters(), strict=True):
            assert other.grad is not None
            other.data -= RATE * other.grad
            other.grad = None
            torch.testing.assert_close(safe_get_full_fp32_param(param), other.data)
