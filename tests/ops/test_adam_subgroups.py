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


def test_what_cannot_be_done_is_said() -> None:
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer: Any = DeepSpeedCPUAdam(params)
    optimizer.step_subgroup(0)  # nothing has a gradient
    assert not optimizer.state
    for param in params:
        param.grad = torch.ones(4)
    with pytest.raises(ValueError, match="2 have gradients: join them"):
        optimizer.step_subgroup(0)
