"""Page-locked memory by its documented names: what came from it is told from what did not."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed.utils.pin_memory import (
    NativePinnedMemory,
    get_active_native_pinned_memory,
    get_native_pinned_memory,
)


def test_copies_and_views() -> None:
    pins, tensor = NativePinnedMemory(), torch.arange(32.0).view(4, 8)
    pinned = pins.pin(tensor)
    assert torch.equal(pinned, tensor) and pinned.ds_pinned is True  # type: ignore[attr-defined]
    view = pinned.reshape(-1).narrow(0, 8, 8)
    assert not hasattr(view, "ds_pinned") and pins.is_pinned(view) and pins.is_pinned(pinned[3])
    assert pins.pin(tensor, match_shape=False).shape == (32,)
    assert pins.pin_empty(tensor, (3, 2)).shape == (3, 2)
    assert not pins.is_pinned(tensor) and not NativePinnedMemory().is_pinned(view)
    assert pins.unpin(pinned) and not pins.is_pinned(pinned) and not pins.is_pinned(view)
    assert not pins.unpin(pinned) and not pins.unpin(tensor)


def test_memory_is_forgotten_with_its_last_view() -> None:
    pins = NativePinnedMemory()
    view = pins.pin(torch.ones(8))[2:4]
    gc.collect()
    assert pins.is_pinned(view) and len(pins._ends) == 1
    del view
    gc.collect()
    assert not pins._ends


def test_tensors_without_an_address() -> None:
    pins = NativePinnedMemory()
    pins.pin(torch.ones(8))
    with FakeTensorMode() as mode:
        assert not pins.is_pinned(mode.from_tensor(torch.zeros(2)))
    assert not pins.is_pinned(torch.zeros(2, device="meta"))


def test_the_one_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_PIN_MEMORY_BACKEND", raising=False)
    assert get_active_native_pinned_memory() is None
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    assert get_active_native_pinned_memory() is get_native_pinned_memory()
