"""``SuperOffloadCPUOptimizer``: Adam on a thread of its own, step by step and back."""

from __future__ import annotations

import pytest
import torch

from deepspeed.compat.superoffload.superoffload_utils import EventTypes, ResultKeys, SuperOffloadCPUOptimizer
from deepspeed.ops.adam import DeepSpeedCPUAdam


def test_steps_and_rollbacks() -> None:
    torch.manual_seed(0)
    params = [torch.randn(1000), torch.randn(37)]
    expected = [torch.nn.Parameter(param.clone()) for param in params]
    oracle = DeepSpeedCPUAdam(expected, lr=1e-2, weight_decay=0.1)
    worker = SuperOffloadCPUOptimizer({"lr": 1e-2, "weight_decay": 0.1})
    assert worker.get_result() is None
    for step in range(3):
        grads = [torch.randn_like(param) for param in params]
        before = [param.clone() for param in params]
        for i, param in enumerate(params):
            worker.async_step(0, i, param, grads[i] * float("inf"))
            worker.async_step(0, i, param, grads[i], rollback=True)
        for i in range(2):
            assert worker.get_result(EventTypes.ADAM_STEP)
            result = worker.get_result(EventTypes.ROLLBACK)
            assert result and torch.equal(result[ResultKeys.UPDATED_PARAM], before[i])
        for i, param in enumerate(params):
            worker.async_step(0, i, param, grads[i], lr=1e-2 / (step + 1))
            expected[i].grad = grads[i]
        oracle.param_groups[0]["lr"] = 1e-2 / (step + 1)
        oracle.step()
        for param, value in zip(params, expected, strict=True):
            assert worker.get_result() and torch.equal(param, value)
    worker.async_step(0, 0, params[0], torch.zeros(1_000_001))
    with pytest.raises(ValueError, match="max_grad_numel"):
        worker.get_result()
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        worker.async_step(0, 0, *params)
