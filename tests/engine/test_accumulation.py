"""The accumulation clock: changes in the middle against a plain count, and resuming there."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.base.logging import logger
from deepspeed.zero.accumulation import AccumulationClock
from tests.pool import distributed


class PlainCount:
    """Micro-batches are put aside until there are as many as the accumulation now says."""

    def __init__(self) -> None:
        self.waiting = 0
        self.updates: list[int] = []

    def micro_batch(self, steps: int, forced: bool | None = None) -> bool:
        self.waiting += 1
        due = self.waiting >= steps if forced is None else forced
        if due:
            self.updates.append(self.waiting)
            self.waiting = 0
        return due


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_changes_gives_the_plain_count(seed: int) -> None:
    choose = random.Random(seed)
    clock, plain = AccumulationClock(choose.randint(1, 5)), PlainCount()
    for micro_step in range(200):
        if choose.random() < 0.2:
            clock.steps = choose.randint(1, 6)
        assert (clock.position, clock.micro_steps) == (plain.waiting, micro_step)
        assert clock.at_boundary == plain.micro_batch(clock.steps)
        clock.tick()
    assert sum(plain.updates) + plain.waiting == 200


def test_forced_boundaries_start_the_count_again() -> None:
    clock, plain = AccumulationClock(3), PlainCount()
    for forced in (False, False, False, False, True, False, True, True, False):
        clock.force(forced)
        assert clock.at_boundary == plain.micro_batch(3, forced)
        clock.tick()
        assert clock.position == plain.waiting
    assert plain.updates == [5, 2, 1]


def test_unmanaged_the_caller_counts() -> None:
    clock = AccumulationClock(3, managed=False)
    for _ in range(4):
        assert not clock.at_boundary
        clock.stepping = True
        assert clock.at_boundary
        clock.tick()
        clock.stepping = False
        assert clock.position == 0
    assert clock.micro_steps == 4


def test_setting_the_number_of_micro_batches() -> None:
    clock = AccumulationClock(4)
    clock.micro_steps = 10
    assert (clock.micro_steps, clock.position) == (10, 2)


def start(stage: int) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
        },
    )
    return engine


def run(engine: Any, micro_steps: range, changes: dict[int, int]) -> list[int]:
    """Micro-batches of each update; ``changes`` are of the global batch, before that micro-batch."""
    updates, waiting = [], 0
    for micro_step in micro_steps:
        if micro_step in changes:
            engine.set_train_batch_size(changes[micro_step])
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(micro_step))
        engine.backward(engine(x).square().mean())
        engine.step()
        waiting += 1
        if engine.was_step_applied():
            updates.append(waiting)
            waiting = 0
    return updates


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=1)
def test_an_engine_between_updates(stage: int) -> None:
    engine = start(stage)
    plain = nn.Linear(3, 2)
    plain.load_state_dict({k: v.clone() for k, v in engine.module_state_dict().items()})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert run(engine, range(4 + 3 + 3 + 5), {4: 6, 10: 10}) == [4, 3, 3, 5]
    first = 0
    for length in (4, 3, 3, 5):
        for micro_step in range(first, first + length):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(micro_step))
            (plain(x).square().mean() / length).backward()
        optimizer.step()
        optimizer.zero_grad()
        first += length
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    engine.destroy()


@distributed(world_size=1)
def test_an_engine_in_the_middle_of_an_update() -> None:
    engine = start(1)
    assert run(engine, range(17), {5: 6, 8: 10, 11: 4, 16: 2}) == [4, 3, 5, 2, 2, 1]
    with pytest.raises(ValueError, match="not a multiple"):
        engine.set_train_batch_size(0)
    engine.destroy()


@pytest.mark.parametrize(
    ("way", "warnings"),
    [("once per batch", 1), ("each", 0), ("forced", 0), ("several losses", 0), ("no_sync", 0), ("plain", 1)],
)
@distributed(world_size=1)
def test_steps_once_per_batch_are_warned_of(way: str, warnings: int) -> None:
    engine, said = start(1), []
    logger.addFilter(keep := lambda record: said.append(record.getMessage()) or True)
    try:
        for micro_step in range(1, 17):
            if way == "forced":
                engine.set_gradient_accumulation_boundary(micro_step % 4 == 0)
            with engine.no_sync() if way == "no_sync" and micro_step % 4 else contextlib.nullcontext():
                loss = engine(torch.ones(2, 3)).square().mean()
                loss.backward() if way == "plain" else engine.backward(loss, retain_graph=True)
            if way == "several losses":
                for _ in range(3):
                    engine.backward(loss, retain_graph=True)
            if way in ("each", "several losses") or micro_step % 4 == 0:
                engine.step()
    finally:
        logger.removeFilter(keep)
    assert (
        len([text for text in said if "engine.step() was called once for 4 micro-batches" in text])
        == warnings
    )
    assert engine.global_steps == (4 if way in ("each", "forced", "several losses") else 1)
    engine.destroy()


@distributed(world_size=1)
def test_resuming_after_a_change(tmp_path: Path) -> None:
    engine = start(2)
    run(engine, range(6), {4: 6})  # an update with 4, and 2 of 3
    assert engine.clock.position == 2
    engine.save_checkpoint(str(tmp_path))
    expected = run(engine, range(6, 12), {})
    twin = start(2)
    twin.set_train_batch_size(6)
    twin.load_checkpoint(str(tmp_path))
    assert twin.clock.position == 2 and twin.micro_steps == 6
    assert run(twin, range(6, 12), {}) == [1, 3] and expected == [1, 3]
    for a, b in zip(engine.module.parameters(), twin.module.parameters(), strict=True):
        assert torch.equal(a, b)
    engine.destroy(), twin.destroy()
