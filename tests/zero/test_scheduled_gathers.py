"""Gathers as collectives (the way of devices), forced on CPUs: scheduled and prefetched in every phase, for models
beyond the live budget, and without a deadlock where ranks differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.zero.gathering import sharded_model
from deepspeed.zero.gathering.launch_order import EntryKind, LaunchEntry, decode, encode, with_prefetch
from deepspeed.zero.gathering.rendezvous import Arrival, Rendezvous
from deepspeed.zero.gathering.scheduled_gatherer import MIN_PATIENCE_S, GatherCounts
from tests.pool import distributed
from tests.zero.models import Block, assert_same, config_for, make_zoo

BLOCKS, WIDTH = 24, 8
NOTHING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


@contextlib.contextmanager
def collectives_preferred() -> Iterator[None]:
    chosen = sharded_model.prefers_collectives
    sharded_model.prefers_collectives = lambda device_type: True
    try:
        yield
    finally:
        sharded_model.prefers_collectives = chosen


class Stack(nn.Module):
    def __init__(self, blocks: int = BLOCKS, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor, extra: bool = False, upto: int | None = None) -> Tensor:
        for block in self.blocks[:upto]:
            if self.reentrant is None or not self.training:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.extra(x) if extra else x


def start(model: nn.Module | None = None, gas: int = 1, **zero: Any) -> Any:
    torch.manual_seed(0)
    with collectives_preferred():
        engine, *_ = deepspeed.initialize(
            model=model or Stack(), config=config_for(3, gas, **{**NOTHING, **zero})
        )
    be_patient(engine, 60.0)  # however busy the machine is
    return engine


def be_patient(engine: Any, seconds: float) -> None:
    gatherer = engine.sharded.gatherer
    gatherer.longest_patience_s = gatherer.patience_s = seconds


def inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(2, WIDTH, generator=generator).requires_grad_()


def train(engine: Any, step: int, **options: Any) -> float:
    for micro in range(engine.gradient_accumulation_steps()):
        loss = engine(inputs(step + 100 * micro), **options).square().mean()
        engine.backward(loss)
        engine.step()
    return loss.item()


def counted(engine: Any, action: Callable[[], Any]) -> GatherCounts:
    engine.sharded.gatherer.counts = counts = GatherCounts()
    action()
    return counts


@pytest.mark.parametrize("gas", [1, 2])
@distributed(world_size=2)
def test_a_steady_step_is_all_scheduled_collectives(gas: int) -> None:
    engine = start(gas=gas)
    for step in range(3):
        train(engine, step)
    counts = counted(engine, lambda: train(engine, 3))
    # Each block in forward and in backward; the last one serves both with one gather.
    assert counts.collectives == gas * (2 * BLOCKS - 1)
    assert counts.hits + counts.misses == counts.collectives
    assert counts.fetches == 0
    assert counts.hits >= 0.95 * (counts.hits + counts.misses + counts.fetches)
    engine.destroy()


@pytest.mark.parametrize("budget", [1500, 10**9])
@distributed(world_size=2)
def test_what_a_budget_keeps_is_not_gathered_again(budget: int) -> None:
    engine = start(stage3_max_live_parameters=budget, stage3_max_reuse_distance=10**9)
    for step in range(5):
        train(engine, step)
    counts = counted(engine, lambda: train(engine, 5))
    assert counts.fetches == 0
    assert counts.collectives == counts.hits + counts.misses  # unneeded buckets cause no collectives
    assert counts.collectives == BLOCKS if budget == 10**9 else BLOCKS < counts.collectives < 2 * BLOCKS - 1
    engine.destroy()


@pytest.mark.parametrize("reentrant", [True, False])
@distributed(world_size=2)
def test_recomputation(reentrant: bool) -> None:
    engine = start(Stack(reentrant=reentrant))
    for step in range(3):
        train(engine, step)
    counts = counted(engine, lambda: train(engine, 3))
    assert counts.fetches == 0
    assert counts.collectives == 2 * BLOCKS - 1
    assert counts.hits >= 0.95 * (counts.hits + counts.misses + counts.fetches)
    engine.destroy()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@distributed(world_size=2)
def test_evaluation_and_generation(context: Any) -> None:
    """Between steps and within one; generation is a pass per token. (Without a context: eval() alone.)"""
    engine = start()
    for step in range(3):
        train(engine, step)

    def evaluate(passes: int) -> None:
        engine.eval()
        with context():
            for i in range(passes):
                engine(inputs(i))
        engine.train()

    counts = counted(engine, lambda: evaluate(2))  # the first pass is not known yet
    assert counts.fetches == BLOCKS
    for passes in (1, 5):
        counts = counted(engine, lambda passes=passes: evaluate(passes))
        assert counts.fetches == 0
        assert counts.collectives == passes * BLOCKS
        assert counts.hits >= 0.95 * (counts.hits + counts.misses + counts.fetches)
    counts = counted(engine, lambda: train(engine, 3))  # an evaluation disturbs no step
    assert (counts.fetches, counts.collectives) == (0, 2 * BLOCKS - 1)

    def within_a_step() -> None:
        loss = engine(inputs(0)).square().mean()
        evaluate(1)
        engine.backward(loss)
        engine.step()

    for _ in range(3):
        within_a_step()
    counts = counted(engine, within_a_step)
    assert counts.fetches == 0
    engine.destroy()


@distributed(world_size=2)
def test_evaluation_of_a_model_that_fits() -> None:
    engine = start(stage3_max_live_parameters=10**9, stage3_max_reuse_distance=10**9)

    def evaluate() -> None:
        with torch.no_grad():
            engine(inputs(0))
            engine(inputs(1))

    for step in range(3):
        train(engine, step)
    evaluate()  # the first time
    train(engine, 3)
    counts = counted(engine, evaluate)
    assert (counts.fetches, counts.collectives) == (0, BLOCKS)  # tokens after the first gather nothing
    for step in (4, 5):  # with an evaluation before it, and without
        counts = counted(engine, lambda step=step: train(engine, step))
        assert (counts.fetches, counts.collectives) == (0, BLOCKS)
    engine.destroy()


@distributed(world_size=2)
def test_gathered_by_hand() -> None:
    engine = start()
    train(engine, 0)

    def by_hand() -> None:
        with deepspeed.zero.GatheredParameters(list(engine.parameters())):
            assert all(p.shape == p.ds_shape for p in engine.parameters())

    counts = counted(engine, by_hand)
    assert (counts.fetches, counts.collectives) == (0, len(engine.sharded.buckets))
    train(engine, 1)
    engine.destroy()


DIFFERENT: dict[str, Callable[[Any, int], None]] = {}


def differs(run: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    DIFFERENT[run.__name__] = run
    return run


@differs
def in_forward_and_backward(engine: Any, step: int) -> None:
    """Another branch, and fewer blocks, on one rank."""
    odd = (step + dist.get_rank()) % 2 == 0
    loss = engine(inputs(step), extra=odd, upto=None if odd else 3).square().mean()
    total = loss.detach().clone()
    dist.all_reduce(total)  # all ranks have finished forward before any continues
    engine.backward(loss)


@differs
def two_forwards_on_one_rank(engine: Any, step: int) -> None:
    loss = engine(inputs(step)).square().mean()
    if dist.get_rank() == step % 2:
        loss = loss + engine(inputs(step + 50)).square().mean()
    engine.backward(loss)


@differs
def evaluations_of_different_number(engine: Any, step: int) -> None:
    with torch.no_grad():
        for i in range(1 + 3 * dist.get_rank()):
            engine(inputs(i))
    engine.backward(engine(inputs(step)).square().mean())


@differs
def one_rank_evaluates_while_the_others_wait(engine: Any, step: int) -> None:
    loss = engine(inputs(step)).square().mean()
    if dist.get_rank() == 1:
        with torch.no_grad():
            engine(inputs(step))
    dist.barrier()
    engine.backward(loss)


@differs
def evaluations_of_different_modules(engine: Any, step: int) -> None:
    with torch.no_grad():
        if dist.get_rank() == 0:
            engine(inputs(step), extra=True)
        else:
            engine.module.blocks[5](inputs(step))
            engine(inputs(step), upto=4)
    engine.backward(engine(inputs(step)).square().mean())


@differs
def evaluation_with_another_branch(engine: Any, step: int) -> None:
    engine.eval()
    with torch.no_grad():
        engine(inputs(step), extra=dist.get_rank() == 0, upto=None if step % 2 else 3 + dist.get_rank())
    dist.barrier()
    engine.train()
    engine.backward(engine(inputs(step)).square().mean())


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("name", list(DIFFERENT))
@distributed(world_size=2, timeout=60)
def test_ranks_may_differ(name: str, reentrant: bool | None) -> None:
    """The same numbers as by fetching, and no rank waits for one that does not come."""
    runs = []
    for preferred in (False, True):
        torch.manual_seed(0)
        context = collectives_preferred() if preferred else contextlib.nullcontext()
        model = Stack(6, reentrant)
        with context:
            engine, *_ = deepspeed.initialize(model=model, config=config_for(3, **NOTHING))
        if preferred:
            be_patient(engine, 0.1)
        for step in range(4):
            DIFFERENT[name](engine, step)
            engine.step()
        engine.destroy()
        runs.append({key: value.clone() for key, value in model.state_dict().items()})
    assert_same(*runs)


@distributed(world_size=2)
def test_ranks_that_differed_meet_again() -> None:
    """After one rank was alone for a while, both find back to collectives."""
    engine = start()

    def evaluate(passes: int) -> None:
        with torch.no_grad():
            for i in range(passes):
                engine(inputs(i))

    evaluate(2)
    be_patient(engine, 0.2)
    if dist.get_rank() == 1:
        evaluate(4)
        assert engine.sharded.gatherer.patience_s == MIN_PATIENCE_S  # less each time
    dist.barrier()
    evaluate(3)
    dist.barrier()
    be_patient(engine, 60.0)
    assert counted(engine, lambda: evaluate(2)).fetches == 0
    engine.destroy()


@distributed(world_size=4)
def test_four_ranks_with_their_own_control_flow() -> None:
    """Unused parameters on some ranks only: sums that are incomplete there must not stop the others."""
    from tests.zero.models import engine_losses

    config = config_for(3, 2, **NOTHING)
    with collectives_preferred():
        losses, weights, _ = engine_losses(make_zoo, config, 5)
    expected, expected_weights, _ = engine_losses(make_zoo, config, 5)
    assert losses == expected
    assert_same(weights, expected_weights)


@distributed(world_size=1)
def test_shards_on_storage_are_read_ahead_in_every_phase(tmp_path: Any) -> None:
    torch.manual_seed(0)
    zero = {**NOTHING, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 3}}
    engine, *_ = deepspeed.initialize(model=Stack(reentrant=True), config=config_for(3, **zero))
    gatherer = engine.sharded.gatherer

    def evaluate() -> None:
        with torch.no_grad():
            engine(inputs(0))

    for step in range(3):
        train(engine, step)
        evaluate()
    for action, gathers in ((lambda: train(engine, 3), 2 * BLOCKS - 1), (evaluate, BLOCKS)):
        gatherer.prefetched = 0
        action()
        assert gatherer.prefetched >= gathers - 2
    engine.destroy()


# The pure parts ---------------------------------------------------------------------------------------------


def need(b: int) -> LaunchEntry:
    return LaunchEntry(EntryKind.NEED, b)


def test_gathers_move_ahead_of_sums_but_not_of_the_release_that_makes_room() -> None:
    summed, gone = LaunchEntry(EntryKind.SUM, 7), LaunchEntry(EntryKind.RESHARD, 0)
    record = [need(0), need(1), gone, summed, need(0), need(2)]
    assert with_prefetch(record, [1, 1, 1], window=0) == [need(0), need(1), summed, need(0), need(2)]
    assert with_prefetch(record, [1, 1, 1], window=1) == [need(0), need(1), need(0), summed, need(2)]
    assert with_prefetch(record, [1, 1, 1], window=2) == [need(0), need(1), need(0), need(2), summed]
    assert decode(encode([record, [], [summed]])) == [record, [], [summed]]


def test_a_rendezvous_decides_once_for_all() -> None:
    from concurrent.futures import ThreadPoolExecutor

    rendezvous = Rendezvous(3)
    with ThreadPoolExecutor(3) as pool:
        same = [pool.submit(rendezvous.join, rank, Arrival("x", [rank, 5], 30.0)) for rank in range(3)]
        assert [answer.result() for answer in same] == [[0, 5]] * 3
        other = [
            pool.submit(rendezvous.join, rank, Arrival("xy"[rank // 2 :], [], 30.0)) for rank in range(3)
        ]
        assert [answer.result() for answer in other] == [None] * 3
    assert rendezvous.join(1, Arrival("x", [], 0.01)) is None  # alone, and gone from the list
    with ThreadPoolExecutor(2) as pool:
        assert [
            f.result() for f in [pool.submit(rendezvous.join, r, Arrival("x", [], 0.05)) for r in (0, 2)]
        ] == [None] * 2
