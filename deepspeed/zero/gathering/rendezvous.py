"""Rendezvous of ranks that are about to run the same pass.

All ranks train together; evaluation and generation may run on a single rank, or on all for different lengths of time,
and this is not known in advance. Before the first gather of such a pass a rank sends one small message to rank 0,
with its intent and how long it is willing to wait. As soon as every rank waits with the same intent, rank 0 tells all
of them to proceed, in the order that it proposes; a rank whose patience runs out first proceeds alone. The decision
is made in one place under one lock, so ranks never get different answers to the same question.

Passes are not numbered, so a rank that has generated more tokens than another is not permanently out of step. Passes
that wait at the same time proceed together.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Arrival:
    intent: str
    proposal: list[int] = field(default_factory=list)
    patience_s: float = 0.0
    decided: bool = False
    order: list[int] | None = None


class Rendezvous:
    """Decides on rank 0; one thread per rank calls ``join``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._waiting: dict[int, Arrival] = {}
        self._changed = threading.Condition()
        self._closed = False

    def join(self, rank: int, arrival: Arrival) -> list[int] | None:
        """Return the order in which all ranks proceed together, or None if they do not."""
        with self._changed:
            self._waiting[rank] = arrival
            if len(self._waiting) == self.size:
                self._decide()
            else:
                self._changed.wait_for(lambda: arrival.decided or self._closed, arrival.patience_s)
            if not arrival.decided:
                self._waiting.pop(rank, None)
            return arrival.order

    def _decide(self) -> None:
        arrivals = self._waiting
        agreed = len({arrival.intent for arrival in arrivals.values()}) == 1
        for arrival in arrivals.values():
            arrival.decided = True
            arrival.order = arrivals[0].proposal if agreed else None
        self._waiting = {}
        self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
