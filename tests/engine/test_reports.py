"""What an engine says: start lines, progress, timers, state dumps, unused parameters. More of it in
`test_live_line.py`."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.base.logging import logger
from deepspeed.engine.observers.progress import start_report
from deepspeed.observe import op_speed
from tests.pool import distributed
from tests.zero.models import batch, config_for, make_zoo


@contextmanager
def captured(level: int = logging.INFO) -> Iterator[list[str]]:
    """The lines that reach standard output at this log level; filled when the block ends."""
    lines: list[str] = []
    before, output = logger.level, io.StringIO()
    logger.setLevel(level)
    try:
        with contextlib.redirect_stdout(output):
            yield lines
    finally:
        logger.setLevel(before)
        lines += output.getvalue().splitlines()


def start(stage: int = 1, **more: Any) -> Any:
    engine, *_ = deepspeed.initialize(model=make_zoo(), config={**config_for(stage), **more})
    return engine


def train(engine: Any, steps: int) -> None:
    for step in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(batch(step, 0, dist.get_rank())))
        engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_at_most_twelve_lines_at_start_on_rank_0(stage: int) -> None:
    with captured() as lines:
        engine = start(stage, steps_per_print=float("inf"))
    if dist.get_rank() == 0:
        assert any("DeepSpeed info: version=1.0.0" in line for line in lines)
        assert len(lines) <= 12
    else:
        assert lines == []
    with captured(logging.WARNING) as lines:
        train(engine, 2)
    assert lines == []
    engine.destroy()


@pytest.mark.parametrize(
    "section, warnings",
    [({"bf16": {"enabled": True}}, 1), ({"torch_autocast": {"enabled": True}}, 1), ({}, 0)],
)
@distributed(world_size=2)
def test_a_dtype_without_instructions_is_told_once(section: dict[str, Any], warnings: int) -> None:
    """On rank 0, with the factor and what to do."""
    with pytest.MonkeyPatch.context() as patch, captured(logging.WARNING) as lines:
        patch.setattr(start_report, "slowdown", lambda dtype: 9.7)
        patch.setattr(
            "deepspeed.base.logging._once", functools.cache(lambda key: [True])
        )  # no earlier test's
        engine, again = start(**section), start(**section)
    found = [line for line in lines if "bfloat16 takes 10 times as long as in float32" in line]
    assert len(found) == (warnings if dist.get_rank() == 0 else 0)
    assert all("without the sections bf16, fp16 and torch_autocast" in line for line in found)
    engine.destroy()
    again.destroy()


def test_slowdown_is_a_ratio_of_times() -> None:
    assert 0.001 < start_report.slowdown(torch.bfloat16) < 1000


def test_an_interrupted_measurement_of_the_slowdown_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = []

    def seconds_of(run: Callable[[], Any], span: float) -> float:
        spans.append(span)
        return {0: 9.0}.get(len(spans) - 1, 1.0)  # the first one was interrupted

    monkeypatch.setattr(op_speed, "seconds_of", seconds_of)
    start_report.slowdown.cache_clear()
    assert start_report.slowdown(torch.float16) == 1.0
    assert spans == [0.0, 0.0, 0.05, 0.05]
    start_report.slowdown.cache_clear()
    wide: Any = SimpleNamespace(products=torch.float32)
    assert start_report.slow_dtype_warning(wide, torch.device("cpu")) is None


@pytest.mark.parametrize("name, notes", [("AdamW", 0), ("Adamax", 1)])
@distributed(world_size=1)
def test_an_offloaded_optimizer_of_torch_is_noted_as_slower(name: str, notes: int, tmp_path: Path) -> None:
    config = config_for(2)
    config["optimizer"] = {"type": name, "params": {"lr": 1e-3}}
    config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    with captured() as lines:
        engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
        train(engine, 2)
    assert sum(f"optimizer state is kept in {tmp_path}" in line for line in lines) == 1
    assert sum("torch's update is slower" in line for line in lines) == notes
    assert len(lines) <= 12
    engine.destroy()


@distributed(world_size=2)
def test_progress_every_so_many_steps() -> None:
    with pytest.MonkeyPatch.context() as patch, captured() as lines:
        patch.delenv("DEEPSPEED_PROGRESS")  # the pool's, whose engines are silent
        engine = start(steps_per_print=2, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=2)
        train(engine, 5)
    printed = [line.split("step=")[1].split(",")[0] for line in lines if "step=" in line]
    assert printed == (["2", "4"] if dist.get_rank() == 0 else [])
    engine.destroy()


@distributed(world_size=1)
def test_no_progress_where_it_is_refused() -> None:
    with captured() as lines:
        engine = start(steps_per_print=float("inf"))
        train(engine, 3)
    assert not [line for line in lines if "step=" in line]
    engine.destroy()


@distributed(world_size=1)
def test_wall_clock_breakdown() -> None:
    with captured() as lines:
        engine = start(wall_clock_breakdown=True)
        train(engine, 3)
    timed = [line for line in lines if "fwd:" in line and "bwd:" in line and "step:" in line]
    assert len(timed) == 3
    names = {"fwd", "bwd", "bwd_inner", "bwd_allreduce", "step", "exposed_comm", "data"}
    assert set(engine.get_wall_clock_timers()) == names
    engine.destroy()


@distributed(world_size=1)
def test_dump_state_and_memory_breakdown() -> None:
    with captured() as lines:
        engine = start(dump_state=True, memory_breakdown=True)
        train(engine, 1)
    text = "\n".join(lines)
    assert "train_micro_batch_size_per_gpu" in text
    assert "after step" in text
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_unused_parameters_are_an_error_on_request(stage: int) -> None:
    engine, *_ = deepspeed.initialize(
        model=make_zoo(), config=config_for(stage, ignore_unused_parameters=False)
    )
    engine.backward(engine(batch(0, 0, dist.get_rank()), dist.get_rank() == 0))
    with pytest.raises(RuntimeError, match=r"never\.weight.*ignore_unused_parameters"):
        engine.step()
    engine.destroy()


@distributed(world_size=1)
def test_schedulers_step_with_the_engine() -> None:
    for scheduler in (
        {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
        {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
    ):
        engine = start(1, scheduler=scheduler)
        rates = []
        for _ in range(3):
            train(engine, 1)
            rates.append(engine.get_lr()[0])
        assert len(set(rates)) == 3
        engine.destroy()
    with pytest.raises(ValueError, match=r"scheduler\.params\.gama"):
        start(1, scheduler={"type": "StepLR", "params": {"step_size": 1, "gama": 0.5}})
    optimizer_seen: list[Any] = []

    def make(optimizer: torch.optim.Optimizer) -> Any:
        optimizer_seen.append(optimizer)
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    engine, _, _, scheduler = deepspeed.initialize(model=make_zoo(), config=config_for(2), lr_scheduler=make)
    assert optimizer_seen == [engine.basic_optimizer]
    assert engine.lr_scheduler is scheduler
    train(engine, 2)
    engine.destroy()
