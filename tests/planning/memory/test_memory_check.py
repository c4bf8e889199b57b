"""Refusing early: only what cannot work, with what to do instead, at no cost for everything else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.config.plan import make_plan
from deepspeed.planning import machine, memory_check
from deepspeed.planning.ledger import MemoryPlace
from deepspeed.planning.machine import Capacity
from deepspeed.planning.memory_check import MemoryPlanError, check_fits
from deepspeed.planning.run_spec import RunSpec
from tests.planning.memory.models import Gpt, config_for
from tests.pool import distributed

MIB = 2**20


class Mesh:
    def __init__(self, size: int = 1) -> None:
        self._size = size

    def size(self, *axes: str) -> int:
        return self._size


def spec(
    model: nn.Module, config: DeepSpeedConfig, mesh: Any, optimizer: Any = None, trained: Any = None
) -> RunSpec:
    return RunSpec(
        module=model,
        plan=make_plan(config),
        config=config,
        mesh=mesh,
        optimizer=optimizer,
        model_parameters=trained,
    )


def check(
    config: dict[str, Any], ranks: int = 1, model: nn.Module | None = None, optimizer: Any = None
) -> None:
    if model is None:
        with torch.device("meta"):
            model = Gpt(blocks=12, width=256)  # 3.4 million parameters, 55 MB of states in fp32
    parsed = DeepSpeedConfig(config)
    check_fits(spec(model, parsed, Mesh(ranks), optimizer))


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    def give(host: int, disk: int | None = None) -> None:
        monkeypatch.setattr(
            memory_check, "total_capacity", lambda plan, device_type: Capacity(None, host, disk)
        )
        monkeypatch.setattr("deepspeed.planning.request.free_disk", lambda folders: disk)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        monkeypatch.delenv("LOCAL_SIZE", raising=False)

    return give


def test_a_run_that_fits_is_not_refused(room: Any) -> None:
    room(60 * MIB)
    check(config_for(2))
    check(config_for(0, bf16=True))


def test_a_run_that_cannot_fit_is_told_what_helps(room: Any, tmp_path: Path) -> None:
    room(50 * MIB, 10**12)
    with pytest.raises(MemoryPlanError) as refusal:
        check(config_for(1, sub_group_size=100_000))
    text = str(refusal.value)
    assert "the model states do not fit" in text
    assert "host: DOES NOT FIT" in text
    assert "optimizer state" in text
    assert '"device": "nvme"' in text
    assert memory_check.SKIP in text


def test_estimates_and_temporaries_refuse_nothing(room: Any) -> None:
    """Compared is the minimum that must exist, not the planned peak."""
    with torch.device("meta"):
        model = Gpt(blocks=12, width=256)
    states = 16 * sum(p.numel() for p in model.parameters())
    # Nothing left for buckets and activations: may be slow or may fail, but not here.
    room(int(states * 1.001))
    check(config_for(2), model=model)
    room(int(states * 0.99))
    with pytest.raises(MemoryPlanError):
        check(config_for(2), model=model)


def test_disks_are_checked(room: Any, tmp_path: Path) -> None:
    config = config_for(2, bf16=True, offload_optimizer={"device": "nvme", "nvme_path": str(tmp_path)})
    room(60 * MIB, 200 * MIB)
    check(config)
    room(60 * MIB, 30 * MIB)
    with pytest.raises(MemoryPlanError, match="disk: DOES NOT FIT"):
        check(config)


def test_ranks_on_one_host_share_its_memory(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room(150 * MIB)
    check(config_for(0), ranks=4)  # the number of local ranks is unknown
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(MemoryPlanError, match="4 ranks x"):
        check(config_for(0), ranks=4)
    check(config_for(1), ranks=4)


def test_the_refusal_can_be_overruled(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room(30 * MIB)
    monkeypatch.setenv(memory_check.SKIP, "1")
    check(config_for(1))


def test_a_plan_that_fails_stops_nothing_and_is_reported(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room(1 * MIB)

    def broken(request: Any) -> Any:
        raise RuntimeError("a bug")

    told = []
    monkeypatch.setattr("deepspeed.planning.run_plan.answer", broken)
    monkeypatch.setattr(memory_check.logger, "exception", lambda text: told.append((text, sys.exc_info()[1])))
    check(config_for(1))
    [(text, error)] = told
    assert "cannot plan the memory" in text and str(error) == "a bug"
    monkeypatch.setenv(memory_check.SKIP, "1")
    check(config_for(1))
    assert len(told) == 1  # nothing was planned


def test_a_full_disk_is_refused(room: Any, tmp_path: Path) -> None:
    room(1 << 50, 0)
    with pytest.raises(MemoryPlanError, match="disk"):
        check(config_for(3, offload_optimizer={"device": "nvme", "nvme_path": str(tmp_path)}))


def test_the_clients_optimizer_is_planned(room: Any) -> None:
    room(45 * MIB)
    config = {key: value for key, value in config_for(2).items() if key != "optimizer"}
    with torch.device("meta"):
        model = Gpt(blocks=12, width=256)
    check(config, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(MemoryPlanError):
        check(config, model=model, optimizer=torch.optim.AdamW(model.parameters()))


def test_what_is_not_known_is_not_refused(room: Any) -> None:
    """Weights alone count for an optimizer that a callable will make, and for a module that is only evaluated."""
    config = {key: value for key, value in config_for(0).items() if key != "optimizer"}
    room(16 * MIB)
    check(config, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    check(config)
    room(12 * MIB)
    with pytest.raises(MemoryPlanError):
        check(config)


def test_only_what_is_trained_has_states(room: Any) -> None:
    room(30 * MIB)
    with torch.device("meta"):
        model = Gpt(blocks=12, width=256)
    few = [{"params": list(model.norm.parameters())}, model.blocks[0].up.weight]
    parsed = DeepSpeedConfig(config_for(1))
    check_fits(spec(model, parsed, Mesh(), trained=few))
    with pytest.raises(MemoryPlanError):
        check_fits(spec(model, parsed, Mesh()))
    assert list(few[0]) == ["params"]  # nothing was added to the client's dict


def test_it_costs_nothing_where_there_is_room(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: no plan is made, and no operator runs."""
    made: list[Any] = []
    monkeypatch.setattr("deepspeed.planning.run_plan.answer", made.append)
    with torch.device("meta"):
        model = Gpt(blocks=19, width=512)
    assert sum(p.numel() for p in model.parameters()) > 10**7
    config = DeepSpeedConfig(config_for(3))
    run = spec(model, config, Mesh(2))
    room(1 << 50, 1 << 50)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        check_fits(run)
    assert made == [] and list(profile.key_averages()) == []
    room(100 * MIB)
    check_fits(run)
    assert len(made) == 1


@distributed(world_size=1)
def test_initialize_refuses_before_it_allocates() -> None:
    import deepspeed

    original = machine._host_total
    machine._host_total = lambda: 1 * MIB  # type: ignore[assignment]
    model = Gpt()
    before = [param.data_ptr() for param in model.parameters()]
    try:
        with pytest.raises(MemoryPlanError):
            deepspeed.initialize(model=model, config=config_for(3))
    finally:
        machine._host_total = original
    assert [param.data_ptr() for param in model.parameters()] == before
    engine, *_ = deepspeed.initialize(model=model, config=config_for(3))
    engine.destroy()


def test_what_there_is(tmp_path: Path) -> None:
    parsed = DeepSpeedConfig(
        config_for(1, offload_optimizer={"device": "nvme", "nvme_path": str(tmp_path / "not" / "there")})
    )
    here = machine.free_now(make_plan(parsed), "cpu")
    whole = machine.total_capacity(make_plan(parsed), "cpu")
    assert here.device is None
    assert 0 < (here.of(MemoryPlace.HOST) or 0) <= (whole.of(MemoryPlace.HOST) or 0)
    assert (here.of(MemoryPlace.DISK) or 0) > 0
    assert machine.free_disk([]) is None
