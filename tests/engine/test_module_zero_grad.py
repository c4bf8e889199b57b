"""``zero_grad`` of the module itself drops what its engine holds, as scripts that train two networks rely on."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import deepspeed
from deepspeed.zero.tensor_fragment import safe_get_full_grad
from tests.pool import distributed

LR = 0.1


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def build(module: nn.Module, stage: int, **changed: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
        **changed,
    }
    return deepspeed.initialize(model=module, config=config)[0]


def train(
    maker: nn.Module,
    judge: nn.Module,
    backward: tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]],
    step: tuple[Callable[[], Any], Callable[[], Any]],
) -> None:
    """The judge learns from two losses; its gradients from the maker's loss are left until the next batch."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        real, noise = torch.randn(2, 6, generator=generator), torch.randn(2, 4, generator=generator)
        judge.zero_grad()
        backward[1](softplus(-judge(real)).mean())
        made = maker(noise)
        backward[1](softplus(judge(made.detach())).mean())
        step[1]()
        maker.zero_grad()
        backward[0](softplus(-judge(made)).mean())
        step[0]()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_two_networks_as_in_plain_torch(stage: int) -> None:
    torch.manual_seed(0)
    modules = [network(4, 6), network(6, 1)]
    references = copy.deepcopy(modules)
    plain = [torch.optim.SGD(module.parameters(), lr=LR) for module in references]
    train(*references, (Tensor.backward, Tensor.backward), (plain[0].step, plain[1].step))
    engines = [build(module, stage) for module in modules]
    train(*modules, (engines[0].backward, engines[1].backward), (engines[0].step, engines[1].step))
    for engine, reference in zip(engines, references, strict=True):
        with deepspeed.zero.GatheredParameters(list(engine.parameters())):
            for got, expected in zip(engine.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(got, expected)
        engine.destroy()


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_accumulation_goes_on(stage: int) -> None:
    """A loop of plain torch whose ``zero_grad`` was left in it, before each micro-batch."""
    torch.manual_seed(0)
    module = network(4, 4)
    reference = copy.deepcopy(module)
    engine = build(module, stage, gradient_accumulation_steps=2)
    for x in torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(3)):
        module.zero_grad()
        engine.backward(engine(x).square().sum())
        engine.step()
        (reference(x).square().sum() / 2).backward()
    torch.optim.SGD(reference.parameters(), lr=LR).step()
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        for got, expected in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got, expected)
    engine.destroy()


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.parameters(), second.parameters()))


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_copies_and_pickles_are_plain_modules(stage: int) -> None:
    module = network(4, 4)
    engine = build(module, stage)
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    engine.backward(engine(torch.ones(2, 4)).sum())
    for other in (copy.deepcopy(module), loaded):
        assert same_weights(other, module)
        other(torch.ones(2, 4)).sum().backward()
        other.zero_grad()
        assert all(param.grad is None for param in other.parameters())
    first = next(module.parameters())
    assert safe_get_full_grad(first) is not None, "a copy dropped the gradients of the original"
    module.zero_grad()
    assert safe_get_full_grad(first) is None
    engine.destroy()
    assert "zero_grad" not in vars(module)
    again = build(loaded, stage)
    again.backward(again(torch.ones(2, 4)).sum()), again.step()
    assert not same_weights(loaded, module)
    again.destroy()
