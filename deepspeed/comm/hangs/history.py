"""Record the last collectives that this rank issued in a process group, which a hang report compares over ranks.

There is one history per process group and process, shared by all engines and documented functions: all ranks issue
the collectives of a group in one order, so the n-th of one rank belongs to the n-th of every other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

LENGTH = 64
"""Number of recorded collectives. Ranks rarely differ by more than the few that can be in flight."""

UNEVEN = -1
"""Replaces the number of elements where it may differ between ranks."""

Call = tuple[str, int, torch.dtype | None, int | None, str]
"""Operation, elements, dtype, root within the group, and the phase of the step that issued it."""


class WatchCallbacks:
    """Callbacks that end the hang watch. `watch.py`, which a single rank does not import, sets both."""

    leave: Callable[[Any], None] = staticmethod(lambda network: None)
    """Called when a network needs no watch any more."""
    end: Callable[[], None] = staticmethod(lambda: None)
    """Called before the process groups are destroyed."""


watch_callbacks = WatchCallbacks()


class OperationHistory:
    """Number of issued collectives (`count`) and the last of them (`calls`). Written by the rank's own thread without
    a lock: a reader may see a call counted but not yet recorded, which the next look corrects."""

    __slots__ = ("calls", "count", "name", "ranks")

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name, self.ranks = name, ranks
        self.count = 0
        self.calls: deque[Call] = deque(maxlen=LENGTH)

    def as_record(self) -> dict[str, Any]:
        """Return the history as plain values, for other ranks."""
        calls, count = list(self.calls), self.count
        return {
            "name": self.name,
            "ranks": list(self.ranks),
            "count": count,
            "calls": [
                [operation, numel, str(dtype).removeprefix("torch.") if dtype else "", root, phase]
                for operation, numel, dtype, root, phase in calls
            ],
        }
