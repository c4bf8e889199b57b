"""What an engine adds to a step, counted instead of timed: calls of our functions, and operations of torch.

Every rank pays both in every step, however small the model. Ceilings leave a quarter of room for calls, so that code
can be written as it reads best: raise one only with what makes it worth it, and lower it with whatever makes a step
cheaper.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed
from tests.pool import distributed

PACKAGE = str(Path(deepspeed.__file__).parent)
WIDTH = 64
ALL_GATHERED = {"stage3_param_persistence_threshold": 0}

# stage, more of its section -> calls of our functions, operations beyond forward and backward
CEILINGS: list[tuple[int, dict[str, Any], int, int]] = [
    (0, {}, 121, 8),
    (1, {}, 120, 4),
    (2, {}, 121, 5),
    (3, {}, 141, 6),
    (3, ALL_GATHERED, 277, 8),
]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls_of(step: Callable[[], None]) -> int:
    """Count the calls of functions of the package."""
    count = 0

    def count_call(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            count += 1

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        step()
    finally:
        sys.setprofile(before)
    return count


def operations_of(step: Callable[[], None]) -> int:
    with Operations() as counted:
        step()
    return counted.count


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def plain_step() -> None:
    """Forward and backward alone."""
    loss_of(make_model()(torch.ones(8, WIDTH))).backward()


def engine_step(
    stage: int, more: dict[str, Any] | None = None, **config: Any
) -> tuple[Any, Callable[[], None]]:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **(more or {})},
        **config,
    }
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    batch = torch.ones(8, WIDTH)

    def step() -> None:
        engine.backward(loss_of(engine(batch)))
        engine.step()

    for _ in range(3):  # the first ones make state, tables and buffers
        step()
    return engine, step


@pytest.mark.parametrize(("stage", "more", "calls", "operations"), CEILINGS)
@distributed(world_size=1)
def test_a_step_costs_no_more_calls(
    stage: int, more: dict[str, Any], calls: int, operations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSPEED_PROGRESS", "0")
    engine, step = engine_step(stage, more)
    counted = [calls_of(step) for _ in range(2)]
    assert counted[0] == counted[1]
    assert counted[0] <= calls
    make, run = make_model(), torch.ones(8, WIDTH)
    beyond = operations_of(step) - operations_of(lambda: loss_of(make(run)).backward())
    assert beyond <= operations
    engine.destroy()


@distributed(world_size=1)
def test_watching_a_run_costs_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of progress is due every so often; the steps in between only look at the clock."""
    monkeypatch.setenv("DEEPSPEED_PROGRESS", "0")
    engine, step = engine_step(0)
    unwatched = calls_of(step)
    engine.destroy()
    monkeypatch.setenv("DEEPSPEED_PROGRESS", "line")
    engine, step = engine_step(0, steps_per_print=1000)
    assert calls_of(step) - unwatched <= 15
    engine.destroy()
