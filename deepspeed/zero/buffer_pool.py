"""Flat scratch memory that is lent and returned."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

_PARTS = "_ds_parts"  # attribute of a buffer


class BufferPool:
    """Flat scratch buffers that are reused, so that memory is touched (and paged in) only once."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._read_until: dict[int, Any] = {}  # address of a free buffer -> event after its last use

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of exactly ``numel`` elements with undefined contents."""
        free = self._free.setdefault((dtype, device), [])
        if free and free[-1].numel() == numel:
            buffer = free.pop()
            if self._read_until:
                self._settle(buffer)
            return buffer
        fitting = [i for i, buffer in enumerate(free) if buffer.numel() >= numel]
        if fitting:
            buffer = free.pop(min(fitting, key=lambda i: free[i].numel()))
            self._settle(buffer)
            return buffer if buffer.numel() == numel else buffer[:numel]
        for buffer in free:  # all too small: a larger one takes their place
            self._settle(buffer)
        free.clear()
        return torch.empty(numel, dtype=dtype, device=device)

    def parts(self, buffer: Tensor, user: Hashable, cut: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """Return the views that ``cut`` makes of a lent buffer for this user. Kept as long as the buffer is, since
        steps repeat; dropped when the buffer is given back."""
        known = vars(buffer).setdefault(_PARTS, {})
        parts = known.get(user)
        if parts is None:
            # of ``data``, not of the buffer: views would keep what they are views of, and that holds them
            parts = known[user] = cut(buffer.data)
        return parts

    def parts_of(self, buffer: Tensor) -> list[Tensor]:
        """Those of all users."""
        known: dict[Hashable, list[Tensor]] = vars(buffer).get(_PARTS, {})
        return [part for parts in known.values() for part in parts]

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

    def devices(self) -> set[torch.device]:
        """Return the devices of the free buffers."""
        return {device for (_, device), free in self._free.items() if free}

    def clear(self) -> None:
        """Release the free buffers."""
        for free in self._free.values():
            for buffer in free:
                self._settle(buffer)
        self._free.clear()
