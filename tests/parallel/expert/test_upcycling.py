"""A dense model starts a mixture of experts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed import comm as dist
from deepspeed.parallel.expert.layer import Experts, MoE
from deepspeed.parallel.expert.upcycling import upcycle
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests.pool import distributed

HIDDEN = 6


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 8), nn.GELU(), nn.Linear(8, HIDDEN))


class Net(nn.Module):
    """``experts`` (0: a dense model) and ``ep_size`` of its one mixture."""

    def __init__(self, experts: int = 0, ep_size: int = 1, **settings: Any) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = MoE(HIDDEN, mlp(), experts, ep_size, **settings) if experts else mlp()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.mlp(self.first(inputs))
        return (hidden[0] if isinstance(hidden, tuple) else hidden) * self.scale


def test_the_mixture_begins_as_the_dense_model() -> None:
    """With one expert per token its weight is the softmax; with all of them the weights sum to 1."""
    torch.manual_seed(0)
    dense, inputs = Net(), torch.randn(9, HIDDEN)
    dense.scale.fill_(2.0)
    mixture = Net(4, k=4, drop_tokens=False)
    gate = copy.deepcopy(mixture.mlp.deepspeed_moe.gate.wg.weight)
    assert upcycle(mixture, dense.state_dict()) == ["mlp"]
    torch.testing.assert_close(mixture(inputs), dense(inputs))
    assert torch.equal(mixture.mlp.deepspeed_moe.gate.wg.weight, gate)


def test_noise_residuals_and_other_names() -> None:
    dense = Net().state_dict()
    mixture = Net(2, use_residual=True)
    renamed = {name.replace("mlp", "ffn"): value for name, value in dense.items()}
    upcycle(mixture, renamed, {"mlp": "ffn"}, noise=0.1)
    experts = mixture.mlp.deepspeed_moe.experts
    assert isinstance(experts, Experts)
    first, second = experts.deepspeed_experts
    assert not torch.equal(first[0].weight, second[0].weight)
    torch.testing.assert_close(first[0].weight, dense["mlp.0.weight"], rtol=0.0, atol=0.3)
    assert torch.equal(mixture.mlp.mlp[0].weight, dense["mlp.0.weight"])


def test_what_does_not_fit() -> None:
    dense = Net().state_dict()
    with pytest.raises(KeyError, match="'other' is not an MoE layer of the model: mlp"):
        upcycle(Net(2), dense, {"other": "mlp"})
    with pytest.raises(
        KeyError, match=r"no 'ffn\.0\.weight', from which to initialize 0\.weight of expert 0 of mlp"
    ):
        upcycle(Net(2), dense, {"mlp": "ffn"})
    with pytest.raises(ValueError, match=r"shape \(3, 6\) in the dense model.*expert 0 of mlp has \(8, 6\)"):
        upcycle(Net(2), {**dense, "mlp.0.weight": torch.zeros(3, 6)})


@distributed(world_size=2)
def test_from_a_checkpoint_over_ranks(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    torch.manual_seed(dist.get_rank())
    first = deepspeed.initialize(model=Net(), config={**config, "zero_optimization": {"stage": 3}})[0]
    first.save_checkpoint(tmp_path)
    wanted = {name: safe_get_full_fp32_param(param) for name, param in first.module.named_parameters()}
    first.destroy()
    model = Net(4, 2)
    upcycle(model, tmp_path)
    engine = deepspeed.initialize(model=model, config={**config, "zero_optimization": {"stage": 2}})[0]
    for expert in engine.module.mlp.deepspeed_moe.experts.deepspeed_experts:
        for name, param in expert.named_parameters():
            assert torch.equal(param.detach(), wanted[f"mlp.{name}"])
    assert torch.equal(engine.module.first.weight.detach(), wanted["first.weight"])
    engine.destroy()
