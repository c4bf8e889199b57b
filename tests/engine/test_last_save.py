"""A last checkpoint before the job is stopped, and the start that goes on from it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.base.constants import JOB_STARTED
from deepspeed.config.deepspeed_config import DeepSpeedConfigError
from deepspeed.config.sections.checkpoint import CheckpointConfig
from tests.pool import distributed


def engine_of(folder: Path, **checkpoint: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
        "checkpoint": {"folder": str(folder), "resume": True, **checkpoint},
    }
    return deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)[0]


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 4)).pow(2).sum())
    engine.step()


def trained(engine: Any, steps: int) -> int:
    """Exit code with which the run ended, 0 if it was not asked to."""
    try:
        while engine.global_steps < steps:
            step(engine)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@distributed(world_size=[1, 2])
def test_sigterm_to_one_rank_is_a_checkpoint_of_all(tmp_path: Path, world_size: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    engine = engine_of(tmp_path / "ckpt", save_at_sigterm=True)
    step(engine)
    if engine.global_rank == engine.world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert trained(engine, 100) == 128 + signal.SIGTERM
    ended_after = engine.global_steps
    assert ended_after <= 3
    weights = engine.module.weight.clone()
    engine.destroy()
    signal.signal(signal.SIGTERM, before)

    engine = engine_of(tmp_path / "ckpt")
    assert engine.global_steps == ended_after
    torch.testing.assert_close(engine.module.weight, weights, rtol=0, atol=0)
    engine.destroy()


@distributed(world_size=2)
def test_the_state_is_saved_before_the_time_limit(tmp_path: Path) -> None:
    os.environ[JOB_STARTED] = str(time.time() - 3600)
    try:
        engine = engine_of(tmp_path, save_before="1:00:30")
        for _ in range(3):
            step(engine)
        assert not (tmp_path / "latest").exists()
        os.environ[JOB_STARTED] = str(time.time() - 3600)
        engine.destroy()
        engine = engine_of(tmp_path, save_before=3600)
        assert trained(engine, 100) == 124
        assert (tmp_path / "latest").read_text() == f"global_step{engine.global_steps}"
        engine.destroy()
    finally:
        del os.environ[JOB_STARTED]


@distributed(world_size=1)
def test_signals_are_the_scripts_again_when_an_engine_ends(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    engine = engine_of(tmp_path, save_at_sigterm=True)
    assert signal.getsignal(signal.SIGTERM) != before
    engine.destroy()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    "written, seconds",
    [(5, 5.0), ("0:01:10", 70.0), ("1-00:00:01", 86401.0), ("SLURM", "slurm"), (None, None)],
)
def test_time_limits(written: Any, seconds: Any) -> None:
    assert CheckpointConfig(folder="x", save_before=written).save_before == seconds


@pytest.mark.parametrize("written", [0, -1, True, "soon", "1:2:3", float("inf")])
def test_wrong_time_limits(written: Any) -> None:
    with pytest.raises(ValueError, match="save_before"):
        CheckpointConfig(folder="x", save_before=written)


@pytest.mark.parametrize("key, value", [("resume", True), ("save_at_sigterm", True), ("save_before", 5)])
def test_a_folder_is_needed(key: str, value: Any) -> None:
    with pytest.raises(DeepSpeedConfigError, match=f"checkpoint.{key}.*checkpoint.folder"):
        deepspeed.config.deepspeed_config.DeepSpeedConfig({"train_batch_size": 1, "checkpoint": {key: value}})
