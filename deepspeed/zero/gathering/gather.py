"""Gathering the shards of a bucket where ranks need not agree on an order: copied, read, or fetched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket, Status

if TYPE_CHECKING:
    from deepspeed.zero.gathering.shard_servers import ShardServers
    from deepspeed.zero.gathering.transitions import Transitions
    from deepspeed.zero.gradients.reducer import LaunchTurns


class LocalGather:
    """One rank: its shard is the whole bucket."""

    turns: LaunchTurns | None = None
    """Whose turn it is, if its gathers are collectives too, in one order with the sums of gradients."""

    def __init__(self, buckets: Sequence[ShardedBucket]) -> None:
        self.buckets = list(buckets)

    def connect(self, transitions: Transitions) -> None:
        """``transitions`` will say what to gather, and be told of every beginning and end of a gather."""
        self.transitions = transitions
        self.lock = transitions.lock

    def gather(self, index: int, phase: Phase = Phase.FORWARD) -> None:
        """Make bucket ``index`` whole; on return it is GATHERED."""
        shard = self.buckets[index].at_rest()
        self.transitions.begin(index).copy_(shard)
        self.transitions.arrived(index)

    def begin_pass(self, phase: Phase, root: Hashable) -> None:
        """An outermost call of module ``root`` begins."""

    def end_pass(self, phase: Phase) -> None:
        """The pass is over."""

    def finish(self, index: int) -> None:
        """End the gather of a bucket that is in flight, if it is."""

    def resharded(self, index: int) -> None:
        """The memory of bucket ``index`` was given back."""

    def end_of_step(self) -> None:
        """All backwards of a step are over; the weights are about to change."""

    def abandon(self) -> None:
        """The step starts over (an exception ended the batch)."""

    def changed(self) -> None:
        """The shards were written, on every rank."""

    def plan_anew(self, prefetch_numel: int) -> None:
        """Between two steps, on all ranks: gather ahead up to so many elements, and forget what the last step gathered
        in which order. Without effect where buckets are gathered when they are needed."""

    def settle(self) -> None:
        """Called by all ranks before the buckets are dissolved; afterwards nothing is in flight on any rank."""

    def close(self) -> None:
        """No more gathers will follow."""


@dataclass(slots=True)
class Walk:
    """A sequence of buckets that is expected to repeat: as it was last time, and as observed now."""

    order: list[int] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)
    cursor: int = 0

    def use(self, index: int) -> None:
        self.observed.append(index)
        if index in self.order[self.cursor :]:
            self.cursor = self.order.index(index, self.cursor) + 1

    def again(self) -> None:
        self.order, self.observed, self.cursor = self.observed, [], 0


class ReadingGather(LocalGather):
    """One rank whose shards are stored in a file: the next buckets in the order of the last step are read ahead.

    ``read(i, full)`` starts to fill ``full`` and returns a function that completes it. At most ``ahead`` buckets of at
    most ``max_numel`` elements are in flight. A step with its backwards is one walk, each module's evaluation another.
    """

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        read: Callable[[int, Tensor], Callable[[], None]],
        *,
        ahead: int,
        max_numel: int,
    ) -> None:
        super().__init__(buckets)
        self.read = read
        self.ahead = ahead
        self.max_numel = max_numel
        self.training = Walk()
        self.evaluations: dict[Hashable, Walk] = {}
        self._evaluation: Walk | None = None
        self.in_flight: dict[int, Callable[[], None]] = {}
        self.foreseen = 0  # gathers already in flight when needed

    def begin_pass(self, phase: Phase, root: Hashable) -> None:
        if phase is Phase.EVALUATION:
            self._evaluation = self.evaluations.setdefault(root, Walk())

    def end_pass(self, phase: Phase) -> None:
        if phase is Phase.EVALUATION and self._evaluation is not None:
            self._evaluation.again()
            self._evaluation = None
            self._finish_all()

    def gather(self, index: int, phase: Phase = Phase.FORWARD) -> None:
        walk = self.training if phase.trains else self._evaluation if phase is Phase.EVALUATION else None
        if walk is not None:
            walk.use(index)
        if index in self.in_flight:
            self.foreseen += 1
        else:
            self._start(index)
        self._finish(index)
        if walk is not None:
            self._read_ahead(walk)

    def _start(self, index: int) -> None:
        self.in_flight[index] = self.read(index, self.transitions.begin(index))

    def _finish(self, index: int) -> None:
        try:
            self.in_flight.pop(index)()
        finally:
            self.transitions.arrived(index)

    def _finish_all(self) -> None:
        for index in list(self.in_flight):
            self._finish(index)

    def _read_ahead(self, walk: Walk) -> None:
        for index in walk.order[walk.cursor : walk.cursor + self.ahead]:
            bucket = self.buckets[index]
            if len(self.in_flight) >= self.ahead or bucket.layout.padded_numel > self.max_numel:
                return
            if bucket.status is Status.SHARDED and index not in self.in_flight:
                self._start(index)

    def end_of_step(self) -> None:
        with self.lock:
            for index in list(self.in_flight):  # predicted but not used: the weights are about to change
                self._finish(index)
                self.transitions.evict(index)
            self.training.again()

    def abandon(self) -> None:
        self._finish_all()
        self.training = Walk(order=self.training.order)

    def settle(self) -> None:
        self._finish_all()


class FetchingGather(LocalGather):
    """Every bucket is fetched when needed. Used on CPUs, where this costs no more than a collective."""

    def __init__(self, buckets: Sequence[ShardedBucket], server: ShardServers) -> None:
        super().__init__(buckets)
        self.server = server

    def gather(self, index: int, phase: Phase = Phase.FORWARD) -> None:
        full = self.transitions.begin(index)
        try:
            self.server.fetch(index, full, phase)
        finally:
            self.transitions.arrived(index)

    def changed(self) -> None:
        self.server.advance()

    def close(self) -> None:
        self.server.retire()
