"""Slots of a decoding batch: which requests hold them, in which rows.

Only the bookkeeping, for a decoding loop of one's own: it says which rows of the cache stay, whose answers are complete
and who moves in. ``RolloutConfig("serving")`` batches continuously by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

__all__ = ["ContinuousBatchRequest", "ContinuousBatchScheduler", "ContinuousBatchUpdate"]


@dataclass(frozen=True)
class ContinuousBatchRequest:
    """A request, by an id that no other one has meanwhile."""

    request_id: Hashable


@dataclass(frozen=True)
class ContinuousBatchUpdate:
    """A change of the batch.

    Attributes:
        active: who is in the batch now, by row.
        keep_slots: rows of the batch before that stay; they move together, in this order, to the front.
        retired: ids of those that have left.
        admitted: who has come; their prompts fill ``admitted_slots``.
    """

    active: tuple[ContinuousBatchRequest, ...]
    keep_slots: tuple[int, ...]
    retired: tuple[Hashable, ...]
    admitted: tuple[ContinuousBatchRequest, ...]

    @property
    def active_ids(self) -> tuple[Hashable, ...]:
        return tuple(each.request_id for each in self.active)

    @property
    def admitted_slots(self) -> tuple[int, ...]:
        """The last rows."""
        return tuple(range(len(self.keep_slots), len(self.active)))


class ContinuousBatchScheduler:
    """First come, first served.

    Args:
        max_batch_size: rows of the batch.
        max_new_tokens: a request leaves with this many at the latest.

    ValueError: one of them is not positive.
    """

    def __init__(self, max_batch_size: int, max_new_tokens: int) -> None:
        for name, value in (("max_batch_size", max_batch_size), ("max_new_tokens", max_new_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value} must be positive")
        self.max_batch_size = max_batch_size
        self.max_new_tokens = max_new_tokens
        self._waiting: deque[ContinuousBatchRequest] = deque()
        self._rows: list[ContinuousBatchRequest] = []
        self._lengths: dict[Hashable, int] = {}
        """Tokens so far, of those that decode."""

    @property
    def active(self) -> tuple[ContinuousBatchRequest, ...]:
        """Requests that decode, by row."""
        return tuple(self._rows)

    @property
    def pending(self) -> tuple[ContinuousBatchRequest, ...]:
        """Requests that wait, in order."""
        return tuple(self._waiting)

    def submit(self, request: ContinuousBatchRequest) -> None:
        """Have it wait for a row. TypeError: it is no request. ValueError: its id is in use."""
        if not isinstance(request, ContinuousBatchRequest):
            raise TypeError(f"a ContinuousBatchRequest is submitted, not a {type(request).__name__}")
        if request.request_id in self._lengths or request in self._waiting:
            raise ValueError(f"duplicate request_id {request.request_id!r}: it waits or decodes already")
        self._waiting.append(request)

    def schedule(self, finished_ids: Iterable[Hashable] = ()) -> ContinuousBatchUpdate:
        """Retire these and fill the free rows. ValueError: one of them does not decode."""
        finished = self._decoding(finished_ids)
        keep = tuple(row for row, each in enumerate(self._rows) if each.request_id not in finished)
        retired = tuple(each.request_id for each in self._rows if each.request_id in finished)
        for request_id in retired:
            del self._lengths[request_id]
        stay = [self._rows[row] for row in keep]
        free = min(self.max_batch_size - len(stay), len(self._waiting))
        admitted = [self._waiting.popleft() for _ in range(free)]
        self._lengths.update({each.request_id: 0 for each in admitted})
        self._rows = stay + admitted
        return ContinuousBatchUpdate(self.active, keep, retired, tuple(admitted))

    def advance(self, finished_ids: Iterable[Hashable] = ()) -> ContinuousBatchUpdate:
        """``schedule`` after a step that gave every row a token: who has ``max_new_tokens`` is finished, too."""
        finished = self._decoding(finished_ids)
        for request_id in self._lengths:
            self._lengths[request_id] += 1
        full = {key for key, length in self._lengths.items() if length >= self.max_new_tokens}
        return self.schedule(finished | full)

    def _decoding(self, ids: Iterable[Hashable]) -> set[Hashable]:
        found = set(ids)
        unknown = found - self._lengths.keys()
        if unknown:
            raise ValueError(f"request {next(iter(unknown))!r} is not active, so that it cannot be finished")
        return found
