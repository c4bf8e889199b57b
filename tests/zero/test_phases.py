"""Each use of a bucket reports the phase that it belongs to, whatever the grad mode is there; and where collectives
are preferred, every phase uses them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.zero.gathering.phases import Phase
from tests.pool import distributed
from tests.zero.test_scheduled_gathers import Stack, counted, inputs, start

BLOCKS = 6
FORWARD, BACKWARD, RECOMPUTATION, EVALUATION = "FORWARD", "BACKWARD", "RECOMPUTATION", "EVALUATION"
SCENARIOS: dict[str, tuple[Callable[[Any, int], None], Callable[[], nn.Module], set[str]]] = {}


def plain() -> nn.Module:
    return Stack(BLOCKS)


def reports(*phases: str, model: Callable[[], nn.Module] = plain) -> Any:
    def add(run: Callable[[Any, int], None]) -> Any:
        SCENARIOS[run.__name__] = run, model, set(phases)
        return run

    return add


def learn(engine: Any, loss: Tensor) -> None:
    engine.backward(loss)
    engine.step()


class HalfFrozen(Stack):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        with torch.no_grad():
            for block in self.blocks[:3]:
                x = block(x)
        return super().forward(x)


@reports(FORWARD, BACKWARD, model=lambda: HalfFrozen(BLOCKS))
def no_grad_inside_a_forward_of_training(engine: Any, step: int) -> None:
    learn(engine, engine(inputs(step)).square().mean())


@reports(EVALUATION)
def evaluation_with_grad_enabled(engine: Any, step: int) -> None:
    engine.eval()
    assert engine(inputs(step)).requires_grad
    engine.train()


@reports(FORWARD, BACKWARD)
def training_in_eval_mode(engine: Any, step: int) -> None:
    engine.module.eval()
    learn(engine, engine(inputs(step)).square().mean())


@reports(FORWARD, BACKWARD, EVALUATION)
def an_evaluation_between_steps_in_eval_mode(engine: Any, step: int) -> None:
    training_in_eval_mode(engine, step)
    with torch.no_grad():
        engine(inputs(step))


@reports(EVALUATION)
def evaluation_in_training_mode(engine: Any, step: int) -> None:
    with torch.inference_mode():
        engine(inputs(step).detach())


class Forces(Stack):
    """Returns the derivative of its energy, in training and in evaluation."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        energy = torch.tanh(super().forward(x)).square().sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return forces


@reports(FORWARD, BACKWARD, model=lambda: Forces(BLOCKS))
def backward_inside_a_forward_of_training(engine: Any, step: int) -> None:
    learn(engine, engine(inputs(step)).square().mean())


@reports(EVALUATION, model=lambda: Forces(BLOCKS))
def backward_inside_an_evaluation(engine: Any, step: int) -> None:
    engine.eval()
    engine(inputs(step))
    engine.train()


@reports(FORWARD, BACKWARD)
def backward_within_a_hook_of_forward(engine: Any, step: int) -> None:
    x = inputs(step)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        torch.autograd.grad(output.sum(), x, retain_graph=True)

    handle = engine.module.blocks[3].register_forward_hook(hook)
    loss = engine(x).square().mean()
    handle.remove()
    learn(engine, loss)


@reports(FORWARD, BACKWARD)
def backward_within_a_hook_of_backward(engine: Any, step: int) -> None:
    x = inputs(step)
    first = engine.module.blocks[0](x)
    total, output = first.sum(), engine(first)
    output.register_hook(lambda grad: torch.autograd.grad(total, x, retain_graph=True)[0] + grad)
    learn(engine, output.square().mean())


@reports(FORWARD, BACKWARD)
def backward_of_a_backward(engine: Any, step: int) -> None:
    x = inputs(step)
    (grad,) = torch.autograd.grad(engine(x).square().sum(), x, create_graph=True)
    learn(engine, grad.square().sum())


@reports(FORWARD, BACKWARD, RECOMPUTATION, model=lambda: Stack(BLOCKS, reentrant=True))
def reentrant_checkpointing(engine: Any, step: int) -> None:
    learn(engine, engine(inputs(step)).square().mean())


@reports(FORWARD, BACKWARD, RECOMPUTATION, model=lambda: Stack(BLOCKS, reentrant=False))
def non_reentrant_checkpointing(engine: Any, step: int) -> None:
    learn(engine, engine(inputs(step)).square().mean())


@reports(EVALUATION, BACKWARD, RECOMPUTATION)
def reentrant_checkpointing_of_blocks_called_by_themselves(engine: Any, step: int) -> None:
    """Their forward is not recorded, and no call around it says what it is for: the pass of each asks first."""
    x = inputs(step)
    for block in engine.module.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    learn(engine, x.square().mean())


@reports("MANUAL")
def gathered_by_hand(engine: Any, step: int) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        pass


@reports("MANUAL", FORWARD, BACKWARD)
def a_forward_among_what_is_gathered_by_hand(engine: Any, step: int) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.module.blocks[2].parameters())):
        loss = engine(inputs(step)).square().mean()
    learn(engine, loss)


def reported(engine: Any, action: Callable[[], Any]) -> set[str]:
    transitions = engine.sharded.transitions
    seen: set[str] = set()
    need = transitions.need

    def spy(needs: Sequence[int], phase: Phase) -> None:
        if needs:
            seen.add(phase.name)
        need(needs, phase)

    transitions.need = spy
    try:
        action()
    finally:
        del transitions.need
    return seen


@pytest.mark.parametrize("name", list(SCENARIOS))
@distributed(world_size=2)
def test_the_phase_is_told_and_every_phase_uses_collectives(name: str) -> None:
    run, make, expected = SCENARIOS[name]
    engine = start(make())
    for step in range(3):
        run(engine, step)
    counts = counted(engine, lambda: run(engine, 3))
    assert counts.fetches == 0
    assert counts.collectives == counts.hits + counts.misses > 0
    assert reported(engine, lambda: run(engine, 4)) == expected
    assert not any(engine.sharded.transitions.holders)
    engine.destroy()


@distributed(world_size=2)
def test_eval_announces_an_evaluation_until_a_backward_goes_through_it() -> None:
    engine = start(plain())
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs.append(engine(inputs(len(outputs))))

    def phases() -> list[set[str]]:
        return [
            reported(engine, forward),
            reported(engine, lambda: learn(engine, outputs[-1].square().mean())),
        ]

    assert phases() == [{FORWARD}, {BACKWARD}]
    engine.eval()
    assert phases() == [{EVALUATION}, {BACKWARD}]
    assert phases() == [{FORWARD}, {BACKWARD}]
    engine.eval()
    assert reported(engine, forward) == {EVALUATION}
    assert phases() == [{EVALUATION}, {BACKWARD}]
    engine.module.train()
    assert phases() == [{FORWARD}, {BACKWARD}]
    engine.module.eval()
    assert reported(engine, forward) == {EVALUATION}
    engine.destroy()


@distributed(world_size=2)
def test_a_forward_that_raises_tells_nothing_of_the_next() -> None:
    engine = start(plain())
    with pytest.raises(RuntimeError):
        engine(torch.zeros(1, 3))
    block = engine.module.blocks[0].eval()
    assert reported(engine, lambda: block(inputs(0))) == {EVALUATION}
    engine.destroy()


@distributed(world_size=2)
def test_a_frozen_engine_inside_the_forward_of_another_evaluates() -> None:
    """A teacher under no_grad, its mode never set: what the student's engine tells is not about it."""
    teacher = start(plain())

    class Student(Stack):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            with torch.no_grad():
                target = teacher.module(x)
            return super().forward(x) - target

    student = start(Student(BLOCKS))

    def step() -> None:
        learn(student, student(inputs(0)).square().mean())

    for _ in range(2):
        step()
    assert reported(teacher, lambda: reported(student, step)) == {EVALUATION}
    assert reported(student, step) == {FORWARD, BACKWARD}
    student.destroy()
    teacher.destroy()


@distributed(world_size=2)
def test_a_thread_beside_the_training_fetches() -> None:
    engine = start(plain())
    learn(engine, engine(inputs(0)).square().mean())

    def aside() -> None:
        thread = threading.Thread(target=lambda: engine(inputs(1)))
        thread.start()
        thread.join()

    assert reported(engine, aside) == {"OTHER_THREAD"}
    counts = counted(engine, aside)
    assert (counts.fetches, counts.collectives) == (BLOCKS, 0)
    engine.destroy()


@distributed(world_size=1)
def test_a_dropped_record_leaves_what_is_gathered_by_hand() -> None:
    """Clients drop the recorded order inside GatheredParameters, after generation."""
    engine = start(plain())
    engine.backward(engine(inputs(0)).square().mean())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        engine.optimizer.parameter_offload.param_coordinator._invalidate_trace()
        engine(inputs(1))
        assert all(param.shape == param.ds_shape for param in engine.parameters())
    assert not any(engine.sharded.transitions.holders)
    assert all(param.numel() == 0 for param in engine.parameters())
    engine.destroy()
