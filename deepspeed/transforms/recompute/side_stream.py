"""Copies between device and host beside the computation; without streams (a CPU), plain copies."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepspeed.base.accelerator import get_accelerator


class SideStream:
    """One stream of copies, made when it is first needed. Copies run in the order in which they were asked for."""

    def __init__(self) -> None:
        self._stream: Any = None
        self.copies = 0

    def copy(self, source: Tensor, target: Tensor) -> Tensor:
        """Begin to fill ``target``, after what the current stream has to do to either. Returns ``target``."""
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
            each.record_stream(self._stream)  # its memory must not be used again before
        return target

    def arrived(self, target: Tensor) -> Tensor:
        """``target`` for the current stream, which waits for all copies that were asked for so far."""
        if self._stream is not None:
            current: Any = get_accelerator().current_stream()
            current.wait_stream(self._stream)
        return target
