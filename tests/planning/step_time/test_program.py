"""The program of a rank against a run of the engine: the same collectives, the same bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.planning.ledger import MemoryPhase
from deepspeed.planning.rehearsal import Rehearsal, SimulatedPool
from deepspeed.planning.request import PlanRequest, answer
from deepspeed.planning.step_time.step import (
    CollectiveStart,
    CollectiveWait,
    ComputeCall,
    OptimizerUpdate,
    StepProgram,
    program_of,
)
from tests.planning.memory.models import MODELS, NOTHING_KEPT, VOCABULARY, Gpt, config_for
from tests.pool import distributed

CASES: dict[str, dict[str, Any]] = {
    "stage 0": config_for(0, bf16=True),
    "stage 1": config_for(1, bf16=True),
    "stage 1, accumulation": config_for(1, gas=3),
    "stage 2": config_for(2),
    "stage 2, accumulation": config_for(2, bf16=True, gas=2),
    "stage 3, everything kept": config_for(3, bf16=True),
    "stage 3, nothing kept": config_for(3, bf16=True, **NOTHING_KEPT),
    "stage 3, nothing kept, accumulation": config_for(3, gas=2, **NOTHING_KEPT),
    "stage 3, MiCS": config_for(3, mics_shard_size=1),
    "stage 2, 4 bits": config_for(2, bf16=True, zero_quantized_gradients=True),
}


def program(config: dict[str, Any], ranks: int = 2, device_type: str = "cpu") -> StepProgram:
    with torch.device("meta"):
        module = Gpt()
    return program_of(
        answer(PlanRequest(module=module, config=config, ranks=ranks, device_type=device_type)).setting
    )


def sent(found: StepProgram) -> tuple[Counter[str], int]:
    """Numbers of collectives, and the bytes that a rank sends in them."""
    starts = [event for event in found.events if isinstance(event, CollectiveStart)]
    parts = {"all_reduce": 2.0, "broadcast": 0.0}
    nbytes = sum(e.nbytes * parts.get(e.operation, 1.0) * (e.ranks - 1) / e.ranks for e in starts)
    return Counter(event.operation for event in starts), round(nbytes)


@pytest.mark.parametrize("case", CASES)
def test_what_the_engine_sends(case: str) -> None:
    distributed(world_size=2)(compare)(config=CASES[case])


@pytest.mark.parametrize("groups", ["zero_hpz_partition_size", "mics_shard_size"])
def test_what_groups_send(groups: str) -> None:
    config = config_for(3, bf16=True, **NOTHING_KEPT, **{groups: 2})
    distributed(world_size=4)(compare)(config=config)


def compare(config: dict[str, Any]) -> None:
    engine, *_ = deepspeed.initialize(model=Gpt(), config=config)

    def step() -> None:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(torch.randint(VOCABULARY, (1,))))
            engine.step()

    for _ in range(2):
        step()
    known = engine._network.communicators()
    for each in known:
        each.reset_counters()
    step()
    counts: Counter[str] = Counter()
    for each in known:
        counts += each.collectives
    expected, nbytes = sent(program(config, known[0].size))
    assert counts == expected
    assert sum(each.bytes_sent for each in known) == pytest.approx(nbytes, rel=1e-3)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_everything_is_computed_once_and_waited_for(stage: int) -> None:
    gas = 3
    for device_type in ("cpu", "cuda"):
        found = program(config_for(stage, gas=gas, **(NOTHING_KEPT if stage == 3 else {})), 4, device_type)
        assert len(found.micro_batches) == gas
        for events in found.micro_batches:
            for phase in (MemoryPhase.FORWARD, MemoryPhase.BACKWARD):
                calls = [e.call for e in events if isinstance(e, ComputeCall) and e.phase is phase]
                assert calls == sorted(calls, reverse=phase is MemoryPhase.BACKWARD)
                assert calls == list(dict.fromkeys(calls))
            assert {e.number for e in events if isinstance(e, CollectiveStart)} == {
                e.number for e in events if isinstance(e, CollectiveWait)
            }
        assert [e for e in found.update if isinstance(e, OptimizerUpdate)] != []


def plain(found: StepProgram) -> list[Any]:
    """Its events with collectives numbered from 0."""
    starts = [event for event in found.events if isinstance(event, CollectiveStart)]
    lowest = min((event.number for event in starts), default=0)
    return [
        replace(event, number=event.number - lowest)
        if isinstance(event, (CollectiveStart, CollectiveWait))
        else event
        for event in found.events
    ]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_no_more_steps_are_rehearsed_than_say_something_new(
    stage: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    step = Rehearsal._step
    monkeypatch.setattr(Rehearsal, "_step", lambda *args: (counts.append(1), step(*args)))
    for gas, more in ((1, {}), (2, {}), (2, {"reduce_bucket_size": 2000})):
        with torch.device("meta"):
            module = MODELS[model]()
        request = PlanRequest(module=module, config=config_for(stage, bf16=True, gas=gas, **more), ranks=4)
        counts.clear()
        short = answer(request)
        assert len(counts) == 2
        with monkeypatch.context() as patched:
            patched.setattr(SimulatedPool, "sizes", lambda self: object())
            whole = answer(request)
        assert len(counts) == 2 + 3
        assert short.ledger.entries == whole.ledger.entries
        assert plain(program_of(short.setting)) == plain(program_of(whole.setting))


def test_a_step_is_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For its memory, its time, and for fewer micro-batches of it."""
    counts: list[int] = []
    run = Rehearsal.run
    monkeypatch.setattr(Rehearsal, "run", lambda self: (counts.append(1), run(self))[1])
    with torch.device("meta"):
        module = Gpt()
    setting = answer(PlanRequest(module=module, config=config_for(2, gas=9), ranks=2)).setting
    found = [program_of(setting, count) for count in (9, 4, 2)]
    assert counts == [1]
    for program, count in zip(found, (9, 4, 2), strict=True):
        assert program == program_of(replace(setting, micro_batches=count))
    counts.clear()
    assert program_of(setting, 1) == program_of(replace(setting, micro_batches=1))
    assert counts == [1, 1]


def test_one_rank_talks_to_nobody() -> None:
    for stage in range(4):
        assert not any(
            isinstance(event, CollectiveStart) for event in program(config_for(stage), ranks=1).events
        )


def test_the_update_is_divided() -> None:
    whole = next(e for e in program(config_for(0)).update if isinstance(e, OptimizerUpdate)).elements
    for stage in (1, 2, 3):
        part = next(
            e for e in program(config_for(stage), ranks=4).update if isinstance(e, OptimizerUpdate)
        ).elements
        assert part == pytest.approx(whole / 4, rel=0.05)


def test_devices_gather_ahead() -> None:
    """At stage 3 the gather of a block starts before the block before it computes."""
    config = config_for(3, **NOTHING_KEPT)
    ahead = {}
    for size in (0, 10**7):
        zero = {**config["zero_optimization"], "stage3_prefetch_bucket_size": size}
        events = program({**config, "zero_optimization": zero}, device_type="cuda").micro_batches[-1]
        first = next(i for i, event in enumerate(events) if isinstance(event, ComputeCall))
        ahead[size] = sum(isinstance(event, CollectiveStart) for event in events[:first])
    assert ahead[10**7] > ahead[0]
