"""The state that a recomputation must find as the first run found it: random states and autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from deepspeed.transforms.recompute.checkpointing import get_cuda_rng_tracker


class RecomputeContext:
    """Taken where a forward begins. The cache of autocast is off, as a cast weight would outlive its tile's graph."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.casts = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type) if self.casts else None
        self.random = self._random_states()
        self.tracker = get_cuda_rng_tracker()
        self.named = self.tracker.get_states()

    def _random_states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._has_generator:
            states.append(self._device_module.get_rng_state(self.device))
        return states

    def _set_random_states(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._has_generator:
            self._device_module.set_rng_state(states[1], self.device)

    @property
    def _has_generator(self) -> bool:
        return self.device.type not in ("cpu", "meta")

    @property
    def _device_module(self) -> Any:
        return torch.get_device_module(self.device)

    @contextlib.contextmanager
    def of_forward(self) -> Iterator[None]:
        if not self.casts:
            yield
            return
        with torch.autocast(self.device.type, self.dtype, cache_enabled=False):
            yield

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Random numbers are drawn once more as in the forward, and afterwards go on as if none had been."""
        now = self._random_states()
        self._set_random_states(self.random)
        try:
            with self.tracker.replay(self.named), self.of_forward():
                yield
        finally:
            self._set_random_states(now)
