"""Low-rank adapters inside the weights that they adapt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.inference.adapters import FusedAdapters


class Parts(nn.Module):
    """A layer with the attributes of DeepSpeed-Chat's, and no methods that fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.lora_right_weight = nn.Parameter(torch.randn(3, 2))
        self.lora_left_weight = nn.Parameter(torch.randn(2, 5))
        self.lora_scaling = 0.5
        self.fuse_lora = False

    def forward(self, inputs: Tensor) -> Tensor:
        plain = inputs @ self.weight.t()
        if self.fuse_lora:
            return plain
        return plain + inputs @ self.lora_right_weight @ self.lora_left_weight * self.lora_scaling


def test_layers_without_methods_are_fused_by_their_parts() -> None:
    module = nn.Sequential(Parts(), nn.ReLU(), nn.Linear(5, 3), Parts())
    adapters = FusedAdapters(module)
    assert len(adapters) == 2
    inputs = torch.randn(4, 3)
    expected, before = module(inputs), [each.weight.clone() for each in (module[0], module[3])]
    with adapters.during():
        assert module[0].fuse_lora and not torch.equal(module[0].weight, before[0])
        torch.testing.assert_close(module(inputs), expected)
    assert all(torch.equal(module[place].weight, kept) for place, kept in zip((0, 3), before, strict=True))
    assert torch.equal(module(inputs), expected)


def test_a_weight_that_layers_share_is_restored() -> None:
    module = nn.Sequential(Parts(), Parts())
    module[1].weight = module[0].weight
    before = module[0].weight.clone()
    with FusedAdapters(module).during():
        assert not torch.equal(module[0].weight, before)
    assert torch.equal(module[0].weight, before)


def test_what_its_owner_has_fused_stays_fused() -> None:
    module = nn.Sequential(Parts(), nn.ReLU(), nn.Linear(5, 3), Parts())
    inputs = torch.randn(4, 3)
    expected = module(inputs)
    first: Any = module[0]
    with torch.no_grad():
        first.weight += first.lora_scaling * (first.lora_right_weight @ first.lora_left_weight).t()
    first.fuse_lora, before = True, first.weight.clone()
    for _ in range(2):
        with FusedAdapters(module).during():
            torch.testing.assert_close(module(inputs), expected)
        assert first.fuse_lora and torch.equal(first.weight, before)
        torch.testing.assert_close(module(inputs), expected)
