"""The count of page-locked memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.base.accelerator import pin_memory_tracker as tracker
from deepspeed.base.accelerator.cuda_accelerator import CUDA_Accelerator


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    with (
        mock.patch.object(tracker, "_total", tracker.PinnedTotal()),
        mock.patch.object(tracker.logger, "info", lines.append),
    ):
        yield lines


def test_a_total_is_said_when_it_has_doubled(said: list[str]) -> None:
    for _ in range(31):
        tracker.track_pinned_memory(1 << 30)
    assert not said
    for _ in range(40):
        tracker.track_pinned_memory(1 << 30)
    assert [line.split(" of ")[0] for line in said] == ["32.00 GiB", "64.00 GiB"]
    tracker.track_pinned_memory(1 << 40)  # several doublings at once
    assert len(said) == 3 and "in 72 allocations" in said[-1]


def test_the_summary(said: list[str]) -> None:
    tracker.pinned_memory_summary()
    tracker.track_pinned_memory(3 << 19)
    tracker.pinned_memory_summary("after start")
    assert said == [
        "0 bytes of host memory pinned in 0 allocations",
        "after start: 1.50 MiB of host memory pinned in 1 allocations",
    ]


def test_accelerators_count(said: list[str]) -> None:
    empty = torch.empty

    def plain(*shape: Any, pin_memory: bool, **more: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*shape, **more)

    with mock.patch.object(torch, "empty", plain):
        found = CUDA_Accelerator().pin_memory(torch.ones(5, 10))
    assert torch.equal(found, torch.ones(5, 10))
    assert (tracker._total.bytes, tracker._total.calls) == (200, 1)
