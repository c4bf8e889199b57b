"""Recorded runs of a small model, and faults to plant in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from tests.zero.models import batch, config_for, make_zoo

Fault = Callable[[Any], None]
FAULTY_STEP = 3
GRADIENT_PHASE = "backward: summed gradient"


def record(
    folder: Path,
    stage: int = 1,
    *,
    gas: int = 1,
    bf16: bool = False,
    seed: int = 0,
    steps: int = 4,
    fault: Fault | None = None,
    batches: Callable[[int, int], Tensor] | None = None,
    zero: dict[str, Any] | None = None,
    **audit: Any,
) -> int:
    """Train, recording to ``folder``. Returns the number of gradient buckets."""
    config = config_for(stage, gas, **(zero or {}))
    config["audit"] = {"record": str(folder), "prove_buckets": 100, **audit}
    config["bf16"] = {"enabled": bf16}
    rank = dist.get_rank()
    batches = batches or (lambda step, micro: batch(step, micro, rank))
    config["train_micro_batch_size_per_gpu"] = len(batches(0, 0))
    engine, *_ = deepspeed.initialize(model=make_zoo(seed), config=config)
    if fault is not None:
        fault(engine)
    for step in range(steps):
        for micro in range(gas):
            engine.backward(engine(batches(step, micro)))
            engine.step()
    buckets = len(engine.core.reducer.buckets)
    engine.destroy()
    return buckets


def in_faulty_step(engine: Any, change: Callable[[], None]) -> Callable[[], None]:
    def at_times() -> None:
        if engine.global_steps + 1 == FAULTY_STEP:
            change()

    return at_times


def param_of(engine: Any, name: str) -> Tensor:
    return dict(engine.module.named_parameters())[name]


def one_ulp(name: str, engine: Any) -> None:
    """One element of the summed gradient is the next larger number, on each rank that holds it."""

    def change() -> None:
        part = engine.core.access.local_gradient(param_of(engine, name))
        if part.numel():
            before = part[-1].item()
            if part.dtype == torch.float32:
                part[-1] = torch.nextafter(part[-1], torch.tensor(torch.inf))
            else:
                part.view(torch.int16)[-1] += 1
            assert part[-1].item() != before

    engine.core.executor.before_step.insert(0, in_faulty_step(engine, change))


def skipped_gradient(name: str, engine: Any) -> None:
    """The gradient of a parameter on the last rank never reaches its bucket."""

    bucket, position = _slot(engine, name)
    accept = bucket.accept

    def skipping(place: int, grad: Tensor, **more: Any) -> None:
        last = dist.get_rank() == dist.get_world_size() - 1
        if engine.global_steps + 1 == FAULTY_STEP and place == position and last:
            grad = torch.zeros_like(grad)
        accept(place, grad, **more)

    bucket.accept = skipping


def wrong_scale(name: str, engine: Any) -> None:
    """The bucket of a parameter is summed where its mean is wanted."""

    bucket, _ = _slot(engine, name)
    right, launch = bucket.factors, bucket.launch

    def launching() -> None:
        wrong = engine.global_steps + 1 == FAULTY_STEP
        bucket.factors = (1.0, 1.0) if wrong else right
        launch()

    bucket.launch = launching


def stale_parameter(name: str, engine: Any) -> None:
    """The last rank keeps the weights of before the update, of a parameter that another rank updates."""

    param = param_of(engine, name)
    old: list[Tensor] = []
    last = dist.get_rank() == dist.get_world_size() - 1
    executor = engine.core.executor
    executor.before_step.append(in_faulty_step(engine, lambda: old.append(param.detach().clone())))

    def restore() -> None:
        assert engine.core.access.interval(param) == (0, 0) or not last
        if last:
            param.data.copy_(old[0])

    executor.publisher.after.append(in_faulty_step(engine, restore))


def _slot(engine: Any, name: str) -> tuple[Any, int]:
    index = engine.core.access.names.index(name)
    for bucket in engine.core.reducer.buckets:
        for position, slot in enumerate(bucket.layout.slots):
            if slot.param == index:
                return bucket, position
    raise KeyError(name)
