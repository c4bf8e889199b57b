"""The last collectives of a process group, as this rank issued them: what a report about a hang compares over ranks.

There is one history per process group and process, whichever engine or documented function communicates: all ranks
issue the collectives of a group in one order, so the n-th of one rank belongs to the n-th of every other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

LENGTH = 64
"""How many collectives are remembered. Ranks rarely differ by more than the few that can be in flight."""

UNEVEN = -1
"""In place of a number of elements, where ranks may have different ones."""

Call = tuple[str, int, torch.dtype | None, int | None, str]
"""Operation, elements, dtype, root within the group, and the part of the step that issued it."""


class WatchEnds:
    """Callbacks that end the watch for hangs. `watch.py`, which a rank alone does not import, sets both."""

    leave: Callable[[Any], None] = staticmethod(lambda network: None)
    """A network needs no watch any more."""
    end: Callable[[], None] = staticmethod(lambda: None)
    """The process groups go."""


watch_ends = WatchEnds()


class OperationHistory:
    """`count` collectives were issued; `calls` are the last of them. Written by the ranks' own thread, without a lock:
    a reader may see a call that is counted and not yet there, which the next look corrects."""

    __slots__ = ("calls", "count", "name", "ranks")

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name, self.ranks = name, ranks
        self.count = 0
        self.calls: deque[Call] = deque(maxlen=LENGTH)

    def as_record(self) -> dict[str, Any]:
        """Return what other ranks get to see, as plain values."""
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
