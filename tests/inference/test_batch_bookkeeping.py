"""Who shares a batch that decodes, against a simulation row by row; which forwards are replayed as graphs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.engine.rollout.continuous_batching import (
    ContinuousBatchRequest,
    ContinuousBatchScheduler,
    ContinuousBatchUpdate,
)


def test_rows_hold_who_the_updates_say() -> None:
    """A cache whose rows are moved as the updates say always belongs to the active requests, in their order."""
    draw = random.Random(3)
    scheduler = ContinuousBatchScheduler(max_batch_size=3, max_new_tokens=4)
    for number in range(20):
        scheduler.submit(ContinuousBatchRequest(number))
    cache: list[int] = []
    lengths: dict[int, int] = {}
    served: list[int] = []

    def apply(update: ContinuousBatchUpdate) -> None:
        nonlocal cache
        cache = [cache[row] for row in update.keep_slots]
        for row, request in zip(update.admitted_slots, update.admitted, strict=True):
            assert row == len(cache)
            cache.append(request.request_id)
            lengths[request.request_id] = 0
        served.extend(update.retired)
        assert tuple(cache) == update.active_ids and len(cache) <= 3

    apply(scheduler.schedule())
    while scheduler.active or scheduler.pending:
        for number in cache:
            lengths[number] += 1
        ended = [number for number in cache if draw.random() < 0.3]
        expected = {n for n in cache if n in ended or lengths[n] == 4}
        before = len(served)
        apply(scheduler.advance(ended))
        assert set(served[before:]) == expected
    assert sorted(served) == list(range(20))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="max_batch_size=0"):
        ContinuousBatchScheduler(0, 1)
    with pytest.raises(ValueError, match="max_new_tokens=-1"):
        ContinuousBatchScheduler(1, -1)
    scheduler = ContinuousBatchScheduler(1, 1)
    with pytest.raises(TypeError, match="not a str"):
        scheduler.submit("a")  # type: ignore[arg-type]
    scheduler.submit(ContinuousBatchRequest("a"))
    with pytest.raises(ValueError, match="duplicate"):
        scheduler.submit(ContinuousBatchRequest("a"))
    with pytest.raises(ValueError, match="not active"):
        scheduler.schedule(["a"])
    scheduler.schedule()
    scheduler.advance()
    scheduler.submit(ContinuousBatchRequest("a"))  # it has left, so that its id is free


class _Recorded:
    """A device whose graphs do again what was done when they were captured."""

    def __init__(self) -> None:
        self.captured = 0

    def device_name(self) -> str:
        return "recorded"

    def create_graph(self) -> Any:
        return SimpleNamespace(pool=lambda: "pool")

    def capture_to_graph(self, graph: Any, pool: Any = None) -> Any:
        assert (pool is None) == (self.captured == 0)
        self.captured += 1
        return _During(graph)

    def replay_graph(self, graph: Any) -> None:
        graph.again()


class _During:
    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        _CURRENT.append(self.graph)

    def __exit__(self, *_: object) -> None:
        _CURRENT.pop()


_CURRENT: list[Any] = []


def _forward(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    output = torch.empty_like(input_ids)

    def again() -> None:
        output.copy_(input_ids * 2)

    if _CURRENT:
        _CURRENT[-1].again = again
    else:
        again()
    return output
