"""DeepSpeedCPUAdam one part of a model after the other: state under the part's number, updates that are undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam


def made(param: torch.Tensor, **options: Any) -> Any:
    return DeepSpeedCPUAdam([param], lr=1e-2, weight_decay=0.1, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_in_turn_are_updated_as_alone(dtype: torch.dtype) -> None:
    parts = [torch.nn.Parameter(torch.randn(40 + 3 * i).to(dtype)) for i in range(3)]
    alone = [torch.nn.Parameter(part.detach().clone()) for part in parts]
    optimizer, others = made(parts[0]), [made(param) for param in alone]
    for _ in range(3):
        for number, (part, param, other) in enumerate(zip(parts, alone, others, strict=True)):
            part.grad = torch.randn(len(part)).to(dtype)
            param.grad = part.grad.clone()
            optimizer.param_groups[0]["params"] = [part]
            optimizer.step_subgroup(number)
            other.step()
            assert torch.equal(part, param)
            assert torch.equal(optimizer.state[number]["exp_avg_sq"], other.state[param]["exp_avg_sq"])
    assert sorted(optimizer.state) == [0, 1, 2] and optimizer.state[1]["step"] == 3


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_updates_are_undone(adamw_mode: bool, bias_correction: bool) -> None:
    param = torch.nn.Parameter(torch.randn(100))
    optimizer = made(param, adamw_mode=adamw_mode, bias_correction=bias_correction)
    grads, before = torch.randn(4, 100), []
    for grad in grads:
        state = optimizer.state.get(5, {})
        before.append((param.detach().clone(), {k: torch.clone(v) for k, v in state.items()}))
        param.grad = grad.clone()
        optimizer.step_subgroup(5)
    for grad, (value, state) in zip(grads.flip(0), before[::-1], strict=True):
        param.grad = grad.clone()
        optimizer.rollback_subgroup(5)
        torch.testing.assert_close(param.detach(), value, rtol=1e-5, atol=1e-5)
        for name in state:
            torch.testing.assert_close(optimizer.state[5][name], state[name], rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="Cannot rollback sub_group_id 5: step count is 0"):
        optimizer.rollback_subgroup(5)


def test_what_cannot_be_done_is_said() -> None:
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer: Any = DeepSpeedCPUAdam(params)
    optimizer.step_subgroup(0)  # nothing has a gradient
    assert not optimizer.state
    with pytest.raises(RuntimeError, match=r"sub_group_id 0: step_subgroup\(0\) has not been called"):
        optimizer.rollback_subgroup(0)
    for param in params:
        param.grad = torch.ones(4)
    with pytest.raises(ValueError, match="2 have gradients: concatenate them"):
        optimizer.step_subgroup(0)
