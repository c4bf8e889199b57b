"""Several chunks per stage, every order: the same bits of every loss and weight, and no more activations than the
formula of the order says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.engine.pipeline.engine import PipelineEngine
from deepspeed.parallel.pipeline import PipelineModule
from deepspeed.parallel.pipeline.schedules.orders import Order
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests.parallel.pipeline.test_engine import COUNT, Plain, batches, compare, layers, loss_of, make_engine
from tests.pool import distributed

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zero-bubble": {},
    "interleaved": {"chunks": 2},
    "zero-bubble-v": {"chunks": 2, "zigzag": True},
    "zero-bubble in chunks": {"chunks": 2},
    "auto": {},
}


def engine_of(
    schedule: str, stages: int, stage: int, blocks: int, *, tied: bool = False, **more: Any
) -> PipelineEngine:
    module = PipelineModule(
        layers(blocks, tied=tied), num_stages=stages, loss_fn=loss_of, **SCHEDULES[schedule]
    )
    return make_engine(module, stage, clip=0.1, pipeline={"schedule": schedule.split()[0]}, **more)


def weights(engine: PipelineEngine) -> dict[str, torch.Tensor]:
    """Gather the fp32 weights of all stages."""
    own = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name: value for part in everyone for name, value in part.items()}


def most_held(engine: PipelineEngine, order: Order) -> int:
    """By the formula of the order, in micro-batches x chunks."""
    left = engine.num_stages - engine.stage_id
    if order.name == "interleaved":
        return min(2 * (left - 1) + (order.chunks - 1) * engine.num_stages + 1, COUNT * order.chunks)
    return left if order.name == "1f1b" else order.chunks * engine.num_stages


def every_order_gives_the_same_bits(stages: int, stage: int, blocks: int, steps: int) -> None:
    expected: tuple[list[torch.Tensor], dict[str, torch.Tensor]] | None = None
    plain = Plain(layers(blocks), lr=0.01, clip=0.1)
    data = [batches(replica) for replica in range(dist.get_world_size() // stages)]
    reference = [plain.step(data) for _ in range(steps)]
    for schedule in SCHEDULES:
        engine = engine_of(schedule, stages, stage, blocks)
        own = batches(engine.grid.get_data_parallel_id())
        losses = []
        for _ in range(steps):
            order = engine._order(COUNT)
            losses.append(engine.train_batch(own))
            assert engine._peak_held == order.held(engine.stage_id) <= most_held(engine, order)
        assert [loss.item() for loss in losses] == pytest.approx(reference, rel=1e-6)
        compare(engine, plain)
        found = weights(engine)
        if expected is None:
            expected = losses, found
        assert all(torch.equal(one, two) for one, two in zip(losses, expected[0], strict=True)), schedule
        assert set(found) == set(expected[1])
        assert all(torch.equal(value, expected[1][name]) for name, value in found.items()), schedule
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=2)
def test_every_order_on_two_ranks(stage: int) -> None:
    every_order_gives_the_same_bits(2, stage, blocks=4, steps=5)


@pytest.mark.parametrize(("stages", "stage"), [(4, 1), (2, 2)])
@distributed(world_size=4)
def test_every_order_on_four_ranks(stages: int, stage: int) -> None:
    every_order_gives_the_same_bits(stages, stage, blocks=6, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
@distributed(world_size=4, timeout=240)
def test_fifty_steps(stages: int) -> None:
    every_order_gives_the_same_bits(stages, 0, blocks=6, steps=50)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble-v"])
@distributed(world_size=2)
def test_ties_and_evaluation(schedule: str) -> None:
    """With a V the tie lies on one stage, else on two."""
    specs = layers(4, tied=True)
    engine, plain = engine_of(schedule, 2, 1, 4, tied=True), Plain(specs, lr=0.01, clip=0.1)
    assert engine.loss_stage == (0 if schedule == "zero-bubble-v" else 1)
    own, same = batches(0), batches(0)
    for _ in range(2):
        assert engine.train_batch(own).item() == pytest.approx(plain.step([same]), rel=1e-5)
    compare(engine, plain)
    fresh = batches(1)
    pairs = [next(fresh) for _ in range(3)]
    with torch.no_grad():
        logits = [plain.forward(inputs) for inputs, _ in pairs]
        losses = [loss_of(each, labels) for each, (_, labels) in zip(logits, pairs, strict=True)]
    found, last = engine.eval_batch(iter(pairs), return_logits=True, num_micro_batches=3)
    torch.testing.assert_close(found, torch.stack(losses).mean())
    assert (last is not None) == engine.has_loss
    if engine.has_loss:
        torch.testing.assert_close(last, logits[-1])
    engine.destroy()


@distributed(world_size=2)
def test_auto_measures_and_chooses() -> None:
    engine = engine_of("auto", 2, 0, 4)
    data, seen = batches(0), []
    for _ in range(5):
        seen.append(engine._order(COUNT).name)
        engine.train_batch(data)
    assert seen[:3] == ["zero-bubble", "zero-bubble", "1f1b"] and seen[3] == seen[4] == engine._choice.chosen
    names: list[Any] = [None, None]
    dist.all_gather_object(names, engine._order(COUNT))
    assert names[0] == names[1]
    engine.destroy()


@distributed(world_size=2)
def test_what_does_not_fit_is_refused() -> None:
    chunked = PipelineModule(layers(), num_stages=2, loss_fn=loss_of, chunks=2)
    with pytest.raises(DeepSpeedConfigError, match="zero-bubble-v.*does not support.*chunks=2"):
        make_engine(chunked, pipeline={"schedule": "zero-bubble-v"})
    odd = PipelineModule(layers(), num_stages=2, loss_fn=loss_of, chunks=2)
    with pytest.raises(DeepSpeedConfigError, match=r"a multiple of 2 \(stages\) micro-batches, not 3"):
        make_engine(odd, pipeline={"schedule": "interleaved"}, gradient_accumulation_steps=3)
    with pytest.raises(ValueError, match="2 with zigzag"):
        PipelineModule(layers(), num_stages=2, chunks=1, zigzag=True)
    with pytest.raises(ValueError, match="cannot be spread over 8 stages"):
        PipelineModule(layers(), num_stages=2, chunks=4)
