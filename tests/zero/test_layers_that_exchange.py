"""Layers that exchange data while gradients are summed, with a parameter that one rank does not use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import deepspeed
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.parallel.sequence.hf.loss import token_mean
from deepspeed.parallel.sequence.layer import DistributedAttention
from tests.pool import distributed

WIDTH, LENGTH, STEPS = 8, 6, 3


def attend(q: Tensor, k: Tensor, v: Tensor, batch_dim: int = 0) -> Tensor:
    """Of [batch, tokens, heads, size]."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Model(nn.Module):
    """``first``: a map of the first half of the tokens, such as those of an image."""

    def __init__(self, attention: Any = attend) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.attention = attention

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        for each in self.maps:
            q = each(x).unflatten(-1, (2, -1))
            x = x + self.attention(q, q, q, 0).flatten(2)
        if kinds.any():
            x = x + kinds[:, :, None] * self.first(x)
        return self.last(x).square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, (torch.arange(LENGTH) < LENGTH // 2).float().expand(2, LENGTH)


@distributed(world_size=2)
@pytest.mark.parametrize("backward", ["engine", "tensor"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_weight_that_one_part_of_a_sequence_uses(stage, backward):
    """The layers have the default group, as scripts give it."""
    torch.manual_seed(0)
    alone = Model()
    model = copy.deepcopy(alone)
    model.attention = DistributedAttention(attend, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "sequence_parallel_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 40,
            "overlap_comm": True,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
        },
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.3)
    for step in range(STEPS):
        x, kinds = batch(step)
        rank = dist.get_rank()
        own = (each.chunk(2, 1)[rank].contiguous() for each in (x, kinds))
        loss = token_mean(engine(*own), torch.tensor(LENGTH), dist.group.WORLD)
        engine.backward(loss) if backward == "engine" else loss.backward()
        engine.step()
        alone(x, kinds).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, param), wanted in zip(engine.module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            engine.whole_tensor(param),
            wanted,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    engine.destroy()


@distributed(world_size=2)
def test_layers_and_sums_have_groups_of_their_own():
    for first, second in ((("sp",), ("dp", "sp")), (("dp", "sp"), ("sp",))):
        mesh = ProcessMesh.build(sp=2)
        assert mesh.group(*first) is not mesh.group(*second)
        assert mesh.ranks(*first) == mesh.ranks(*second)
        assert mesh.group("sp") is dist.group.WORLD  # what a script passes to its layers
    mesh = ProcessMesh.build(ep=2)
    assert mesh.among((0, 1)).group is mesh.group("ep") is not mesh.group("dp", "sp")
    assert mesh.group("dp") is mesh.group("dp", "sp") is mesh.among((0, 1), same=True).group


@distributed(world_size=2)
def test_a_unit_with_one_group_for_both():
    class Unit:
        def get_sequence_parallel_group(self):
            return dist.group.WORLD

        def get_sequence_data_parallel_group(self):
            return dist.group.WORLD

    mesh = ProcessMesh.from_mpu(Unit())
    assert mesh.group("sp") is dist.group.WORLD
    assert mesh.group("dp", "sp") is not dist.group.WORLD


@distributed(world_size=4, timeout=30)
def test_a_group_of_ranks_with_different_numbers_of_groups():
    """As of two stages, one of which has experts."""
    rank = dist.get_rank()
    mesh = ProcessMesh.build(pp=2, dp=2)
    mesh.communicator("dp", "sp")
    if rank >= 2:
        mesh.among((2, 3))
    total = torch.full((3,), float(rank))
    mesh.communicator("pp").all_reduce(total).wait()
    assert total.tolist() == [2.0 * (rank % 2) + 2] * 3


@distributed(world_size=2)
def test_gradients_that_a_script_asks_autograd_for():
    """``torch.autograd.grad``, as in gradient penalties, does not reach the reducer; the next update is unaffected."""
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    for each in (plain, model):
        each.attention = DistributedAttention(attend, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "sequence_parallel_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    x, kinds = (each.chunk(2, 1)[dist.get_rank()].contiguous() for each in batch(0))
    kinds = torch.ones_like(kinds)
    found = torch.autograd.grad(engine(x, kinds), list(engine.parameters()))
    expected = torch.autograd.grad(plain(x, kinds), list(plain.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    engine.backward(engine(x, kinds))
    engine.step()
    for before, after in zip(plain.parameters(), engine.parameters(), strict=True):
        assert not torch.equal(before, after)
