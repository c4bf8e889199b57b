"""After an out-of-memory error, its rank logs the cheapest change, and the error is raised unchanged."""

from __future__ import annotations

import re

import pytest
import torch

import deepspeed
from deepspeed.base.logging import logger
from deepspeed.engine.observers.advice import is_out_of_memory
from deepspeed.engine.observers.planned_memory import request_of
from deepspeed.planning.advice import WORTH_IT, cheapest_saving
from deepspeed.planning.ledger import MemoryPlace
from deepspeed.planning.request import answer
from tests.planning.memory.models import Gpt
from tests.pool import distributed


@pytest.mark.parametrize(
    "error, expected",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
            ),
            True,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("expected scalar type Float"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def _engine(**zero):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    model = Gpt(blocks=2, width=128)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _logged(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(logger, "error", lines.append)
    return lines


@distributed(world_size=2)
@pytest.mark.parametrize("where", ["forward", "step"])
def test_the_cheapest_change_is_logged_once(monkeypatch, where):
    engine = _engine(stage=0)
    lines = _logged(monkeypatch)

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    tokens = torch.zeros(8, dtype=torch.long)
    for _ in range(2):
        with (
            monkeypatch.context() as patch,
            pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"),
        ):
            if where == "forward":
                patch.setattr(engine.module, "forward", fail)
            else:
                patch.setattr(engine.core.store.optimizer, "multi_tensor_step", fail)
            engine.backward(engine(tokens).sum())
            engine.step()
    (line,) = lines
    assert "zero_optimization.stage: 1" in line  # of two ranks each keeps half of the moments
    assert "train_micro_batch_size_per_gpu below 4" in line and "activation checkpointing" in line
    planned = answer(request_of(engine))
    found = cheapest_saving(planned, MemoryPlace.HOST)
    assert found is not None
    change, after = found
    assert change == "zero_optimization.stage: 1"
    assert after <= (1 - WORTH_IT) * planned.ledger.peak(MemoryPlace.HOST)[0]
    engine.backward(engine(tokens).sum())  # the engine continues
    engine.step()


@distributed(world_size=1)
def test_real_exhaustion_of_the_host(monkeypatch):
    engine = _engine(stage=0)
    lines = _logged(monkeypatch)
    monkeypatch.setattr(engine.module, "forward", lambda tokens: torch.empty(2**60))
    with pytest.raises(RuntimeError, match="memory"):
        engine(torch.zeros(8, dtype=torch.long))
    assert len(lines) == 1 and re.match(r"out of memory: this run plans [\d.]+ [KM]iB per rank", lines[0])


@distributed(world_size=1)
def test_other_errors_are_not_spoken_of(monkeypatch):
    engine = _engine(stage=0)
    lines = _logged(monkeypatch)
    with pytest.raises(TypeError):
        engine(no_such_argument=1)
    assert not lines
