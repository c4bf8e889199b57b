"""The functions of the optimizers' ops, called without an optimizer object, against torch.optim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.ops import op_builder
from deepspeed.ops.adam import DeepSpeedCPUAdam

STEPS = 4


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def trained(optimizer_class: Any, start: Tensor, grads: list[Tensor], **options: Any) -> Tensor:
    param = torch.nn.Parameter(start.clone())
    optimizer = optimizer_class([param], **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def values(*shape: int) -> tuple[Tensor, list[Tensor]]:
    return torch.randn(shape), [torch.randn(shape) for _ in range(STEPS)]


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam(decoupled: bool) -> None:
    op: Any = op_builder.CPUAdamBuilder().load()
    start, grads = values(33, 5)
    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    expected = trained(torch.optim.AdamW if decoupled else torch.optim.Adam, start, grads, **options)
    ours = trained(DeepSpeedCPUAdam, start, grads, adamw_mode=decoupled, **options)
    assert op.create_adam(7, 1.0, 0.5, 0.5, 1.0, 0.0, decoupled, False) == 0
    flat, exp_avg, exp_avg_sq = start.clone().view(-1), torch.zeros(165), torch.zeros(165)
    version = flat._version
    for step, grad in enumerate(grads, 1):
        rest = (0.01, 0.8, 0.9, 1e-6, 0.1, True, flat, grad.view(-1), exp_avg, exp_avg_sq)
        assert op.adam_update(7, step, *rest) == 0
    torch.testing.assert_close(flat.view(33, 5), expected)
    assert torch.equal(flat.view(33, 5), ours) and flat._version > version
    assert op.destroy_adam(7) == 0
    with pytest.raises(ValueError, match="there is no optimizer 7; call create_adam first"):
        op.adam_update(7, 1, *rest)


def test_updates_by_the_number_of_an_optimizer() -> None:
    start, grads = values(17)
    options = {"lr": 0.01, "weight_decay": 0.1}
    expected = trained(DeepSpeedCPUAdam, start, grads, **options)
    first, second = (DeepSpeedCPUAdam([torch.nn.Parameter(start.clone())], **options) for _ in range(2))
    assert first.opt_id != second.opt_id
    flat, exp_avg, exp_avg_sq = start.clone(), torch.zeros(17), torch.zeros(17)
    for step, grad in enumerate(grads, 1):
        rest = (0.01, 0.9, 0.999, 1e-8, 0.1, True, flat, grad, exp_avg, exp_avg_sq)
        assert second.ds_opt_adam.adam_update(second.opt_id, step, *rest) == 0
    assert torch.equal(flat, expected)
    second.ds_opt_adam.destroy_adam(second.opt_id)
