"""The ``safe_get_*`` and ``safe_set_*`` functions on parameters that an engine trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.zero.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
)
from tests.pool import distributed

WIDTH = 8


def build(stage: int, bf16: bool) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.0}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine, model


def loss_of(engine: Any, rank: int) -> torch.Tensor:
    dtype = next(engine.module.parameters()).dtype
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))
    return engine(x.to(dtype)).float().square().mean()


@distributed(world_size=2)
@pytest.mark.parametrize(("stage", "bf16"), [(0, True), (1, False), (1, True), (2, False), (2, True)])
def test_state_can_be_read_and_written(stage: int, bf16: bool) -> None:
    engine, model = build(stage, bf16)
    params = list(model.parameters())
    engine.backward(loss_of(engine, dist.get_rank()))

    for param in params:
        gradient = safe_get_full_grad(param)
        assert gradient is not None and gradient.shape == param.shape and gradient.dtype == torch.float32
        both = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(both, gradient)
        assert torch.equal(both[0], both[1]) and gradient.abs().sum() > 0
        safe_set_full_grad(param, torch.full_like(gradient, 0.5))
    safe_update_full_grad_vectorized(params, lambda grad, p: grad * 2)
    assert all(
        torch.equal(grad, torch.ones_like(grad))
        for grad in map(safe_get_full_grad, params)
        if grad is not None
    )

    before = [safe_get_full_fp32_param(param) for param in params]
    engine.step()
    for param, old in zip(params, before, strict=True):
        master = safe_get_full_fp32_param(param)
        assert master is not None and old is not None and master.shape == param.shape
        # Adam's first step is lr in the direction of the gradient, which was set to one everywhere.
        assert torch.allclose(master, old - 0.01, atol=1e-6)
        assert torch.equal(param.detach(), master.to(param.dtype))
        moment = safe_get_full_optimizer_state(param, "exp_avg")
        assert moment is not None and torch.allclose(moment, torch.full_like(moment, 0.1))
        local = safe_get_local_fp32_param(param)
        assert local is not None and local.numel() <= param.numel()

        safe_set_full_fp32_param(param, torch.full(param.shape, 3.0))
        safe_set_full_optimizer_state(param, torch.full(param.shape, 7.0), "exp_avg")
        assert torch.equal(param.detach(), torch.full_like(param, 3.0))
        moment = safe_get_full_optimizer_state(param, "exp_avg")
        assert moment is not None and torch.equal(moment, torch.full_like(moment, 7.0))
