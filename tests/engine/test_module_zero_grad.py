"""``zero_grad`` of engine, optimizer and module: one rule at every stage. Between the micro-batches of an update
nothing is lost; outside of it what the engine holds is dropped, as scripts that train two networks rely on."""

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


CALLS: dict[str, Callable[[Any], Any]] = {
    "engine": lambda engine: engine.zero_grad(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
    "module": lambda engine: engine.module.zero_grad(),
    "module in place": lambda engine: engine.module.zero_grad(set_to_none=False),
    "own optimizer in place": lambda engine: engine.basic_optimizer.zero_grad(set_to_none=False),
}


def micro_batches(number: int) -> Tensor:
    return torch.randn(number, 2, 4, generator=torch.Generator().manual_seed(3))


def assert_one_update(engine: Any, inputs: Tensor, reference: nn.Module, case: str) -> None:
    """The engine's weights are those of ``reference`` after one update with the mean loss over ``inputs``."""
    precision = engine.plan.precision.param or torch.float32
    for x in inputs:
        (reference(x).square().sum() / len(inputs)).backward()
    torch.optim.SGD(reference.parameters(), lr=LR).step()
    near = {} if precision == torch.float32 else {"atol": 2e-3, "rtol": 2e-3}
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        for got, expected in zip(engine.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got.float(), expected, **near, msg=lambda text: f"{case}: {text}")


def train_micro_batch(engine: Any, x: Tensor) -> None:
    engine.backward(engine(x).float().square().sum())


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_accumulation_goes_on(stage: int, half: bool) -> None:
    """A loop of plain torch whose ``zero_grad`` was left in it, before each micro-batch or between its backward and
    ``step()``."""
    precision = {"fp16": {"enabled": True, "loss_scale": 64}} if half else {}
    for case, zero_grad in CALLS.items():
        torch.manual_seed(0)
        module = network(4, 4)
        reference = copy.deepcopy(module)
        engine = build(module, stage, gradient_accumulation_steps=3, **precision)
        for number, x in enumerate(micro_batches(3)):
            zero_grad(engine)
            train_micro_batch(engine, x)
            if number == 1:
                zero_grad(engine)
            engine.step()
        assert_one_update(engine, micro_batches(3), reference, case)
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=2)
def test_the_caller_may_tell_the_boundary(stage: int) -> None:
    """As Accelerate does, which calls ``step()`` only on the boundary."""
    for case, zero_grad in CALLS.items():
        torch.manual_seed(0)
        module = network(4, 4)
        reference = copy.deepcopy(module)
        engine = build(module, stage, gradient_accumulation_steps=3)
        for number, x in enumerate(micro_batches(3)):
            zero_grad(engine)
            engine.set_gradient_accumulation_boundary(number == 2)
            train_micro_batch(engine, x)
        engine.step()
        assert_one_update(engine, micro_batches(3), reference, case)
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_outside_of_an_update_gradients_are_dropped(stage: int) -> None:
    for (case, zero_grad), steps in zip(CALLS.items(), (1, 2, 1, 2, 1), strict=True):
        torch.manual_seed(0)
        module = network(4, 4)
        reference = copy.deepcopy(module)
        engine = build(module, stage, gradient_accumulation_steps=steps)
        train_micro_batch(engine, torch.ones(2, 4))
        zero_grad(engine)
        for x in micro_batches(steps):
            train_micro_batch(engine, x)
            engine.step()
        assert_one_update(engine, micro_batches(steps), reference, case)
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_an_unfinished_update_can_be_abandoned(stage: int) -> None:
    torch.manual_seed(0)
    module = network(4, 4)
    reference = copy.deepcopy(module)
    engine = build(module, stage, gradient_accumulation_steps=2)
    train_micro_batch(engine, torch.ones(2, 4))
    engine.step()
    engine.abandon_update()
    assert engine.micro_steps == 0
    for x in micro_batches(2):
        train_micro_batch(engine, x)
        engine.step()
    assert engine.global_steps == 1
    assert_one_update(engine, micro_batches(2), reference, "abandoned")
    engine.destroy()


@distributed(world_size=1)
def test_a_backward_beside_the_engine_after_the_sums() -> None:
    """At stage 0 it finds in ``param.grad`` what was summed already; the error says what helps."""
    module = network(4, 4)
    engine = build(module, 0, gradient_accumulation_steps=2)
    for _ in range(2):
        engine.set_gradient_accumulation_boundary(True)
        train_micro_batch(engine, torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=r"call engine.abandon_update\(\) before this backward"):
        module(torch.ones(2, 4)).sum().backward()
    engine.abandon_update()
    module(torch.ones(2, 4)).sum().backward()
    engine.step()
    engine.destroy()


@distributed(world_size=1)
def test_a_client_keeps_its_optimizer() -> None:
    """Copies and pickles of it are plain, and so is itself without the engine."""
    module = network(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    stored = io.BytesIO()
    torch.save(optimizer, stored)
    stored.seek(0)
    train_micro_batch(engine, torch.ones(2, 4))
    engine.step()
    for other in (copy.deepcopy(optimizer), torch.load(stored, weights_only=False)):
        assert "zero_grad" not in vars(other)
        first = other.param_groups[0]["params"][0]
        first.grad = torch.ones_like(first)
        other.zero_grad()
        assert first.grad is None
    engine.destroy()
    assert "zero_grad" not in vars(optimizer)


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
