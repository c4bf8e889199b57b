"""`wall_clock_breakdown`: who waits for whom and for data, on every rank, and what it costs."""

from __future__ import annotations

import csv
import json
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.comm.collectives import Communicator
from deepspeed.comm.pending import Pending
from deepspeed.comm.timed import TimedCommunicator, WaitTime
from deepspeed.engine.observers.progress.wall_clock import COMPARED_TIMERS, MAX_RANKS, _shown
from deepspeed.parallel.pipeline.module import LayerSpec, PipelineModule
from tests.pool import distributed, run
from tests.zero.models import batch, config_for, make_zoo

NAP_S = 0.15


def start(stage: int, **more: Any) -> Any:
    config = config_for(stage, stage3_param_persistence_threshold=0) if stage == 3 else config_for(stage)
    return deepspeed.initialize(model=make_zoo(), config={**config, **more})[0]


def _napping(stage: int, folder: Path) -> dict[str, float]:
    """Rank 1 comes late to its backward, and data comes late to both."""
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    engine = start(stage, wall_clock_breakdown=True, steps_per_print=4, csv_monitor=monitor)
    dist.barrier()  # rank 0 writes the lines of the start, for which it imports the planner
    rank, sums = dist.get_rank(), {"exposed_comm": 0.0, "data": 0.0}
    clock: Any = next(
        each.__self__
        for each in engine.events._subscribers["after_step"]
        if hasattr(getattr(each, "__self__", None), "elapsed_ms")
    )
    for step in range(4):
        loss = engine(batch(step, 0, rank))
        time.sleep(NAP_S * (rank == 1))
        engine.backward(loss)
        engine.step()
        assert (
            0 <= clock.step_waits_ms <= min(clock.elapsed_ms["step"], clock.elapsed_ms["exposed_comm"]) + 0.1
        )
        for name in sums:
            sums[name] += clock.elapsed_ms[name]
        time.sleep(NAP_S)
    assert type(engine.mesh.communicator("dp")) is TimedCommunicator
    engine.destroy()
    return sums


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_each_rank_says_what_it_waits_for(tmp_path: Path, stage: int) -> None:
    first, second = run(_napping, 2, stage=stage, folder=tmp_path)
    nap = NAP_S * 1e3
    assert first["exposed_comm"] > 4 * nap * 0.9 and second["exposed_comm"] < first["exposed_comm"] / 2
    assert min(first["data"], second["data"]) > 3 * nap * 0.99
    rows = {}
    for file in (tmp_path / "job").glob("Train_Samples_rank*.csv"):
        with open(file, newline="") as text:
            rows[file.stem.removeprefix("Train_Samples_")] = [float(y) for _, y in list(csv.reader(text))[1:]]
    waits = {rank: rows[f"rank{rank}_elapsed_time_ms_exposed_communication"] for rank in (0, 1)}
    assert waits[0] == pytest.approx([first["exposed_comm"] / 4], rel=1e-4)
    assert waits[1] == pytest.approx([second["exposed_comm"] / 4], rel=1e-4)
    assert rows["rank0_elapsed_time_ms_data"] == pytest.approx([first["data"] / 4], rel=1e-4)


def _counted(stage: int, wanted: bool) -> tuple[int, int, int, list[float]]:
    """Calls inside the clock that collectives cause, other calls of it, collectives, and losses."""
    engine = start(stage, wall_clock_breakdown=wanted)
    found, losses = {"timed": 0, "clock": 0}, []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            found["timed"] += name.endswith("comm/timed.py")
            found["clock"] += name.endswith(("engine/observers/progress/wall_clock.py", "observe/timer.py"))

    for step in range(3):
        if step == 2:
            for each in engine._network.communicators():
                each.reset_counters()
            sys.setprofile(count)
        loss = engine(batch(step, 0, dist.get_rank()))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    sys.setprofile(None)
    collectives = sum(sum(each.collectives.values()) for each in engine._network.communicators())
    engine.destroy()
    return found["timed"], found["clock"], collectives, losses


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_breakdown_costs_a_few_calls_per_collective(stage: int) -> None:
    """A call takes about 0.1 us, so that 30 collectives take 25 us: a quarter of a percent of a step of 10 ms."""
    with_it, without = (run(_counted, 2, stage=stage, wanted=wanted) for wanted in (True, False))
    for (timed, clock, collectives, losses), (none, few, _, same) in zip(with_it, without, strict=True):
        assert 0 < timed <= 8 * collectives and 0 < clock < 160
        assert none == 0 and few < 12
        assert same == losses


@distributed(world_size=2)
def test_without_a_breakdown_nothing_is_timed() -> None:
    engine = start(2)
    assert type(engine.mesh.communicator("dp")) is Communicator and engine._network.waits is None
    engine.destroy()


@distributed(world_size=2)
def test_a_timeline_of_the_same_run_sees_the_collectives(tmp_path: Path) -> None:
    trace = {"path": str(tmp_path), "steps": [1, 2], "operations": False}
    engine = start(2, wall_clock_breakdown=True, trace=trace)
    for step in range(3):
        engine.backward(engine(batch(step, 0, dist.get_rank())))
        engine.step()
    written = json.loads((tmp_path / f"rank{dist.get_rank():05d}.trace.json").read_text())
    tracks = {event["args"].get("track") for event in written["traceEvents"] if event["ph"] == "X"}
    assert "collectives" in tracks
    engine.destroy()


def _pipeline() -> dict[str, float]:
    torch.manual_seed(0)
    layers = [LayerSpec(torch.nn.Linear, 8, 8) for _ in range(4)]
    model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "wall_clock_breakdown": True,
    }
    engine: Any = deepspeed.initialize(model=model, config=config)[0]
    rows = iter([(torch.ones(2, 8), torch.ones(2, 8))] * 20)
    for _ in range(3):
        time.sleep(NAP_S * (dist.get_rank() == 0))
        engine.train_batch(rows)
    times = engine.get_wall_clock_timers()
    engine.timers("exposed_comm").reset()
    found = {"waits": engine._network.waits.seconds, **times}
    channels = [channel for _, channel in engine.pipe_channels()]
    found["wrapped"] = sum("receive" in vars(channel) for channel in channels)
    engine.destroy()
    return found


def test_stages_of_a_pipeline_wait_for_each_other() -> None:
    for found in run(_pipeline, 2):
        assert found["wrapped"] == 1 and {"exposed_comm", "data", "bwd"} <= found.keys()


def test_only_the_first_wait_counts() -> None:
    waits = WaitTime()
    inner = Pending(lambda: time.sleep(0.01))
    assert waits.around(lambda: waits.around(inner.wait)) is True
    assert 10 <= waits.take() < 1000 and waits.take() == 0


def test_of_many_ranks_the_extremes_are_shown() -> None:
    times = [dict(zip(COMPARED_TIMERS, (rank, -rank), strict=True)) for rank in range(MAX_RANKS + 1)]
    shown = dict(_shown([{name: float(ms) for name, ms in each.items()} for each in times]))
    assert shown.keys() == {0, MAX_RANKS} and set(shown[0]) == set(COMPARED_TIMERS)
    assert len(_shown(shown[0] and [shown[0]] * MAX_RANKS)) == MAX_RANKS
