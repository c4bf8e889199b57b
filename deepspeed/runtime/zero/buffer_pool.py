"""Flat scratch memory that is lent and returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class BufferPool:
    """Flat scratch buffers that are reused, so that memory is touched (and paged in) only once."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._read_until: dict[int, Any] = {}  # address of a free buffer -> event after its last use

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of exactly ``numel`` elements with undefined contents."""
        free = self._free.setdefault((dtype, device), [])
        fitting = [i for i, buffer in enumerate(free) if buffer.numel() >= numel]
        if fitting:
            buffer = free.pop(min(fitting, key=lambda i: free[i].numel()))
            self._settle(buffer)
            return buffer[:numel]
        for buffer in free:  # all too small: a larger one takes their place
            self._settle(buffer)
        free.clear()
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: Tensor, read_until: Any = None) -> None:
        """``read_until``: an event after the last use of the buffer on another stream."""
        whole = buffer if buffer._base is None else buffer._base
        if read_until is not None:
            self._read_until[whole.data_ptr()] = read_until
        self._free.setdefault((whole.dtype, whole.device), []).append(whole)

    def _settle(self, buffer: Tensor) -> None:
        """Order the current stream's next work after the buffer's last use on another stream."""
        event = self._read_until.pop(buffer.data_ptr(), None)
        if event is not None:
            event.wait()

    def clear(self) -> None:
        """Release the free buffers."""
        for free in self._free.values():
            for buffer in free:
                self._settle(buffer)
        self._free.clear()
