"""Copies between device and host that overlap computation; plain copies on a CPU, which has no streams."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepspeed.base.accelerator import get_accelerator


class SideStream:
    """A stream for copies, created on first use. Copies run in the order in which they were requested."""

    def __init__(self) -> None:
        self._stream: Any = None
        self.copies = 0

    def copy(self, source: Tensor, target: Tensor) -> Tensor:
        """Start copying ``source`` to ``target``, ordered after the current stream's work. Returns ``target``."""
        self.copies += 1
        on_device = [each for each in (source, target) if each.device.type == "cuda"]
        if not on_device:
            return target.copy_(source)
        accelerator: Any = get_accelerator()
        if self._stream is None:
            self._stream = accelerator.Stream()
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for each in on_device:
            each.record_stream(self._stream)  # its memory must not be reused before the copy completes
        return target

    def arrived(self, target: Tensor) -> Tensor:
        """Return ``target``, after making the current stream wait for all copies requested so far."""
        if self._stream is not None:
            current: Any = get_accelerator().current_stream()
            current.wait_stream(self._stream)
        return target
