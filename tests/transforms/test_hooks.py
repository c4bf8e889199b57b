"""Replacements of a layer run the hooks that a user had registered on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.compression.helper import convert_conv1d_to_linear, module_replacement
from deepspeed.inference.kernels import quantize_linears
from deepspeed.parallel.tensor.apply import apply_plan
from deepspeed.parallel.tensor.planning.planner import plan_module
from deepspeed.parallel.tensor.trial import try_split
from deepspeed.transforms.weight_quantization.utils import recursive_setattr
from tests.parallel.tensor.threads import run_ranks

WIDTH = 64


class Scaled(nn.Linear):
    """A subclass that computes what its base does."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Conv1D(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = (
            WIDTH,
            nn.Parameter(torch.randn(WIDTH, WIDTH)),
            nn.Parameter(torch.ones(1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Scaled(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def split(model: nn.Module) -> None:
    plan = plan_module(model, 2, inputs={"x": torch.empty(2, WIDTH, device="meta")})

    def work(group: Any) -> None:
        if group.rank == 0:  # the other only takes part
            try_split(plan, group)
            apply_plan(model, plan, group, lambda *_: None)
        else:
            try_split(plan, group)
            apply_plan(Block(), plan, group, lambda *_: None)

    run_ranks(2, work)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "tensor parallelism": split,
    "compression": lambda model: module_replacement(model, "down"),
    "8-bit kernels": lambda model: quantize_linears(model, 8, 1, torch.float32),
    "quantized weights": lambda model: recursive_setattr(model, "down", nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_hooks_of_a_layer_stay_and_can_be_removed(name: str) -> None:
    model, seen = Block(), []
    layers = [model.down, model.up] if name == "tensor parallelism" else [model.down]
    handles = []
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(lambda *_: seen.append("before")))
        handles.append(layer.register_forward_hook(lambda *_, **__: seen.append("after"), with_kwargs=True))
        handles.append(layer.register_full_backward_hook(lambda *_: seen.append("backward")))
    TRANSFORMS[name](model)
    seen.clear()  # a plan follows the model with its hooks
    assert name == "compression" or all(layer not in list(model.modules()) for layer in layers)
    for path in ("up", "down")[-len(layers) :]:
        layer = model.get_submodule(path)
        for hooks, count in (
            (layer._forward_pre_hooks, 1),
            (layer._forward_hooks, 1),
            (layer._backward_hooks, 1),
        ):
            assert len(hooks) == count, path
        assert layer._forward_hooks_with_kwargs
    if name != "tensor parallelism":  # whose other rank is gone
        model(torch.randn(2, WIDTH, requires_grad=True))
        assert seen == ["before", "after"]
    for handle in handles:
        handle.remove()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_a_hook_that_changes_an_output_still_does() -> None:
    model = nn.Sequential(Conv1D())
    model[0].register_forward_hook(lambda *args: args[-1] * 0)
    made = convert_conv1d_to_linear(model, Conv1D)
    assert type(made[0]) is nn.Linear and not made(torch.randn(2, WIDTH)).any()
