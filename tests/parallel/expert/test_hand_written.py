"""Layers with experts that a script writes itself, over the documented groups, against one process with all experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm import documented_groups as groups
from deepspeed.parallel.expert.layer import MoE
from deepspeed.parallel.expert.sharded_moe import _AllToAll
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests.pool import distributed

HIDDEN, EXPERTS, TOKENS = 6, 4, 5


def expert(number: int) -> nn.Linear:
    torch.manual_seed(100 + number)
    return nn.Linear(HIDDEN, HIDDEN)


class Dense(nn.Module):
    """Each token goes to its best expert; all of them are here."""

    def __init__(self) -> None:
        nn.Module.__init__(self)  # not that of ``MoE``, from which a class below inherits too
        torch.manual_seed(1)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([expert(number) for number in range(EXPERTS)])

    def forward(self, tokens: Tensor) -> Tensor:
        best, choice = self.gate(tokens).softmax(-1).max(-1)
        sent = F.one_hot(choice, EXPERTS).t()[..., None] * tokens  # [experts, tokens, hidden]
        made = self.through_experts(sent)
        return (made * F.one_hot(choice, EXPERTS).t()[..., None]).sum(0) * best[:, None]

    def through_experts(self, sent: Tensor) -> Tensor:
        return torch.stack([each(rows) for each, rows in zip(self.experts, sent, strict=True)])


class Spread(Dense):
    """The same with the experts spread over ranks. It asks for them when `deepspeed.initialize` calls it."""

    group: Any = None

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.ep_size, self.called = ep_size, []

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        self.called.append(use_data_before_expert_parallel_)
        name = f"ep_size_{self.ep_size}"
        assert groups.mpu is None
        groups._create_expert_and_data_parallel(self.ep_size, use_data_before_expert_parallel_)
        self.group, rank = groups._get_expert_parallel_group(name), groups._get_expert_parallel_rank(name)
        share = EXPERTS // self.ep_size
        self.experts = self.experts[share * rank : share * (rank + 1)]
        for param in self.experts.parameters():
            param.allreduce, param.group_name = False, name  # type: ignore[attr-defined]

    def through_experts(self, sent: Tensor) -> Tensor:
        there = _AllToAll.apply(self.group, sent).unflatten(0, (self.ep_size, -1))
        made = torch.stack([each(there[:, number]) for number, each in enumerate(self.experts)], 1)
        return _AllToAll.apply(self.group, made.flatten(0, 1))


class Inheriting(Spread, MoE):
    """Shares only the name with the documented class: it has its own experts and its own dispatch."""

    num_experts = EXPERTS


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))


def trained_alone(world: int) -> Dense:
    model = Dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        sum(model(rows(step, rank)).square().mean() for rank in range(world)).div(world).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", [Spread, Inheriting])
@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=4)
def test_equals_one_process(kind: type[Spread], stage: int) -> None:
    layer = kind(2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=nn.Sequential(layer), config=config)
    assert layer.called == [False] and engine.has_moe_layers == (kind is Inheriting)
    for step in range(3):
        engine.backward(engine(rows(step, dist.get_rank())).square().mean())
        engine.step()
    alone, first = trained_alone(4), 2 * (dist.get_rank() % 2)
    for name, param in layer.named_parameters():
        wanted: Any = alone.get_parameter(name)
        if name.startswith("experts."):
            _, number, rest = name.split(".", 2)
            wanted = alone.experts[first + int(number)].get_parameter(rest)
        torch.testing.assert_close(safe_get_full_fp32_param(param), wanted.detach(), rtol=1e-5, atol=1e-6)
    engine.destroy()


@distributed(world_size=4)
def test_exchange() -> None:
    """Equal parts there and back, whatever lies in memory between them; without a group nothing moves."""
    group = dist.new_group(range(4))
    given = torch.arange(48.0).view(3, 8, 2).transpose(0, 1).add(100 * dist.get_rank()).requires_grad_()
    there = _AllToAll.apply(group, given)
    whole = [torch.arange(48.0).view(3, 8, 2).transpose(0, 1) + 100 * rank for rank in range(4)]
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    assert torch.equal(there, torch.cat([each[mine] for each in whole]))
    assert torch.equal(_AllToAll.apply(group, there), given)
    factor = torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
    (grad,) = torch.autograd.grad((there * factor).sum(), given)
    theirs = [torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    assert torch.equal(grad, torch.cat([each[mine] for each in theirs]))
    assert torch.equal(_AllToAll.apply(None, given), given)
    with pytest.raises(ValueError, match="6 rows cannot be sent to 4 ranks in equal parts"):
        _AllToAll.apply(group, torch.zeros(6, 2))


class Unit:
    """Two ranks hold the parts of dense layers."""

    @staticmethod
    def get_model_parallel_world_size() -> int:
        return 2


@distributed(world_size=4)
def test_groups_beside_tensor_parallelism() -> None:
    assert groups._get_expert_model_parallel_world_size() == 1
    groups._create_expert_data_and_model_parallel(2, Unit())
    assert groups._get_expert_model_parallel_world_size() == 2
    rank = dist.get_rank()
    group = groups._get_expert_parallel_group("ep_size_2")
    assert torch.distributed.get_process_group_ranks(group) == [rank % 2, rank % 2 + 2]
    assert groups._get_expert_broadcast_src_rank("ep_size_2") == rank
    with pytest.raises(ValueError, match="expert_parallel_size_=4 does not divide the 2 ranks"):
        groups._create_expert_data_and_model_parallel(4, Unit())
