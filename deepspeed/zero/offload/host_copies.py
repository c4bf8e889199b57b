"""Transfer between a device and host memory: pinned buffers, and copies on a separate stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator


def has_own_memory(device: torch.device) -> bool:
    """Return whether ``device`` has its own memory, apart from the host's, so that offloading from it means copying."""
    return device.type != "cpu"


def host_empty(numel: int, dtype: torch.dtype, *, pin: bool) -> Tensor:
    """Return uninitialized host memory [numel], page-locked if ``pin`` and the accelerator is CUDA."""
    return torch.empty(numel, dtype=dtype, pin_memory=pin and get_accelerator().device_name() == "cuda")


class HostCopies:
    """Copies gradients to host memory while backward runs. On the CPU these are plain copies."""

    def __init__(self, device: torch.device) -> None:
        accelerator: Any = get_accelerator()
        self.accelerator = accelerator
        self.stream = accelerator.Stream() if device.type == "cuda" else None
        self.last: Any = None
        self.bytes = 0

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Start the copy; return an event after which ``source`` may be overwritten, or None if it may be now."""
        self.bytes += target.numel() * target.element_size()
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(self.accelerator.current_stream())
        with self.accelerator.stream(self.stream):
            target.copy_(source, non_blocking=True)
            self.last = self.accelerator.Event()
            self.last.record(self.stream)
        return self.last

    def synchronize(self) -> None:
        """Wait until all copies have arrived on the host."""
        if self.last is not None:
            self.last.synchronize()
            self.last = None
