"""After an exception in forward, backward or step the engine is as it was before the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.zero.gathering import sharded_model
from tests.pool import distributed, run
from tests.zero.models import Block, assert_same, config_for

WIDTH, BLOCKS, STEPS = 8, 4, 4
NOTHING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


class Blown(Exception):
    pass


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: str) -> Tensor:
        ctx.armed = armed
        if armed == "forward":
            raise Blown(armed)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.armed == "backward":
            raise Blown(ctx.armed)
        return grad, None


class Fused(nn.Module):
    """A fuse between the blocks; ``armed`` says in which direction it blows."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(BLOCKS))
        self.reentrant = reentrant

    def forward(self, x: Tensor, armed: str = "") -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            if i == BLOCKS // 2:
                x = Fuse.apply(x, armed)
        return x.square().mean()


class Touchy(torch.optim.AdamW):
    armed = False

    def step(self, closure: Any = None) -> Any:
        if self.armed:
            raise Blown("step")
        return super().step(closure)


def micro_batch(engine: Any, number: int, armed: str = "", *, plain: bool = False) -> None:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    loss = engine(torch.randn(2, WIDTH, generator=generator).requires_grad_(), armed)
    if plain:
        loss.backward()
    else:
        engine.backward(loss)


def fails_in_forward(engine: Any) -> None:
    micro_batch(engine, 99, "forward")


def fails_in_backward(engine: Any) -> None:
    micro_batch(engine, 99, "backward")


def fails_in_plain_backward(engine: Any) -> None:
    micro_batch(engine, 99, "backward", plain=True)


def fails_in_step(engine: Any) -> None:
    micro_batch(engine, 99)
    engine.basic_optimizer.armed = True
    try:
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
    finally:
        engine.basic_optimizer.armed = False
        engine.clock._forced = None


def nothing(engine: Any) -> None:
    pass


def zeroes_gradients(engine: Any) -> None:
    engine.zero_grad()


def zeroes_through_the_optimizer(engine: Any) -> None:
    engine.optimizer.zero_grad()


def train(
    stage: int,
    fails: Callable[[Any], None] | None,
    afterwards: Callable[[Any], None] = nothing,
    *,
    gas: int = 1,
    reentrant: bool | None = None,
    collectives: bool = False,
    **options: Any,
) -> tuple[dict[str, Tensor], list[Any]]:
    """Final weights, and what the engine counted. The failing batch comes between the second step and the third."""
    torch.manual_seed(0)
    model = Fused(reentrant)
    config = {**config_for(stage, gas, **(NOTHING if stage == 3 else {})), **options}
    del config["optimizer"]
    chosen = sharded_model.prefers_collectives
    sharded_model.prefers_collectives = lambda device_type: collectives
    try:
        engine, *_ = deepspeed.initialize(
            model=model, config=config, optimizer=Touchy(model.parameters(), lr=1e-2)
        )
    finally:
        sharded_model.prefers_collectives = chosen
    norms = []
    for step in range(STEPS):
        if step == 2 and fails is not None:
            for micro in range(gas - 1):
                micro_batch(engine, 50 + micro)
                engine.step()
            with pytest.raises(Blown):
                fails(engine)
            afterwards(engine)
        for micro in range(gas):
            micro_batch(engine, step * gas + micro, plain=step % 2 == 1)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    counted = [engine.global_steps, engine.micro_steps, engine.skipped_steps, norms]
    if engine.sharded is not None:
        coordinator = engine.sharded.coordinator
        assert not coordinator.active
        assert not any(engine.sharded.transitions.holders)
        assert not coordinator._backwards
        assert all(b.status.name == "SHARDED" for b in engine.sharded.buckets)
    engine.destroy()
    return {key: value.clone() for key, value in model.state_dict().items()}, counted


FAILURES = [fails_in_forward, fails_in_backward, fails_in_plain_backward, fails_in_step]


@pytest.mark.parametrize("fails", FAILURES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=[1, 2])
def test_the_next_batch_trains_as_if_nothing_had_been(
    world_size: int, stage: int, fails: Callable[[Any], None]
) -> None:
    """Also with micro-batches of the same batch accumulated before: they are dropped with it."""
    for gas in (1, 2):
        weights, counted = train(stage, fails, gas=gas)
        expected, expected_counted = train(stage, None, gas=gas)
        assert counted == expected_counted
        assert_same(weights, expected)


@pytest.mark.parametrize("afterwards", [zeroes_gradients, zeroes_through_the_optimizer])
@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_a_plain_backward_that_raised_is_noticed_by_whatever_comes_next(
    stage: int, afterwards: Callable[[Any], None]
) -> None:
    weights, counted = train(stage, fails_in_plain_backward, afterwards, gas=2)
    expected, expected_counted = train(stage, None, gas=2)
    assert counted == expected_counted
    assert_same(weights, expected)


@pytest.mark.parametrize("fails", FAILURES)
@pytest.mark.parametrize("reentrant", [None, True, False])
@distributed(world_size=2)
def test_with_gathers_as_collectives(reentrant: bool | None, fails: Callable[[Any], None]) -> None:
    weights, counted = train(3, fails, gas=2, reentrant=reentrant, collectives=True)
    expected, expected_counted = train(3, None, gas=2, reentrant=reentrant)
    assert counted == expected_counted
    assert_same(weights, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_with_16_bit_weights(stage: int) -> None:
    options = {"bf16": {"enabled": True}}
    for fails in FAILURES:
        weights, counted = train(stage, fails, gas=2, **options)
        expected, expected_counted = train(stage, None, gas=2, **options)
        assert counted == expected_counted
        assert_same(weights, expected)


@distributed(world_size=2)
def test_a_failing_evaluation_drops_nothing() -> None:
    torch.manual_seed(0)
    runs = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = Fused(None)
        engine, *_ = deepspeed.initialize(model=model, config=config_for(3, 2, **NOTHING))
        micro_batch(engine, 0)
        engine.step()
        if fails:
            with pytest.raises(Blown), torch.no_grad():
                engine(torch.ones(1, WIDTH), "forward")
        micro_batch(engine, 1)
        engine.step()
        assert engine.global_steps == 1
        engine.destroy()
        runs.append({key: value.clone() for key, value in model.state_dict().items()})
    assert_same(*runs)


def fail_in_turn(positions: list[int]) -> dict[str, Tensor]:
    """Ranks fail in backward at different places of the same batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))
    engine, *_ = deepspeed.initialize(model=model, config=config_for(2))

    def blow(_: Tensor) -> None:
        raise Blown

    for step in range(3):
        if step == 1 and positions:
            hook = model[positions[dist.get_rank()]].register_forward_hook(
                lambda module, args, output: output.register_hook(blow) and None
            )
            with contextlib.suppress(Blown):
                engine(torch.ones(1, WIDTH)).square().mean().backward()
            hook.remove()
        engine.backward(engine(torch.full((1, WIDTH), float(step + dist.get_rank()))).square().mean())
        engine.step()
    engine.destroy()
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_ranks_may_fail_at_different_places() -> None:
    expected = run(fail_in_turn, 2, positions=[])
    for left, right in zip(run(fail_in_turn, 2, positions=[2, 0]), expected, strict=True):
        assert_same(left, right)
