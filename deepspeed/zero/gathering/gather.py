"""Gather the shards of a bucket without a common order of ranks: by copying, reading, or fetching."""

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
    """Gatherer of a single rank, whose shard is the whole bucket."""

    turns: LaunchTurns | None = None
    """Decides whose turn it is, if its gathers are collectives that share one order with the gradient sums."""

    def __init__(self, buckets: Sequence[ShardedBucket]) -> None:
        self.buckets = list(buckets)

    def connect(self, transitions: Transitions) -> None:
        """Connect to ``transitions``, which requests gathers and is notified of the beginning and end of each."""
        self.transitions = transitions
        self.lock = transitions.lock

    def gather(self, index: int, phase: Phase = Phase.FORWARD) -> None:
        """Make bucket ``index`` whole; on return it is GATHERED."""
        shard = self.buckets[index].at_rest()
        self.transitions.begin(index).copy_(shard)
        self.transitions.arrived(index)

    def begin_pass(self, phase: Phase, root: Hashable) -> None:
        """Begin a pass: an outermost call of module ``root``."""

    def end_pass(self, phase: Phase) -> None:
        """End the pass."""

    def finish(self, index: int) -> None:
        """Finish the gather of bucket ``index`` if it is in flight."""

    def resharded(self, index: int) -> None:
        """Note that bucket ``index`` was resharded."""

    def end_of_step(self) -> None:
        """End the backwards of a step; the weights are about to change."""

    def abandon(self) -> None:
        """Restart the step, after an exception ended the batch."""

    def changed(self) -> None:
        """Note that every rank has written its shards."""

    def set_prefetch(self, prefetch_numel: int) -> None:
        """Set the prefetch window in elements and forget the order of the last step. Called on all ranks between two
        steps; no effect without prefetching."""

    def settle(self) -> None:
        """Complete everything in flight, before the buckets are dissolved. Called by all ranks."""

    def close(self) -> None:
        """Close; no more gathers will follow."""


@dataclass(slots=True)
class Walk:
    """A sequence of buckets that is expected to repeat: the previous one, and the one observed now."""

    order: list[int] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)
    cursor: int = 0

    def use(self, index: int) -> None:
        self.observed.append(index)
        if index in self.order[self.cursor :]:
            self.cursor = self.order.index(index, self.cursor) + 1

    def restart(self) -> None:
        self.order, self.observed, self.cursor = self.observed, [], 0


class ReadingGather(LocalGather):
    """Gatherer of a single rank whose shards are in a file; reads ahead the next buckets in the order of the last
    step.

    ``read(i, full)`` starts to fill ``full`` and returns a function that completes it. At most ``max_ahead`` buckets of
    at most ``max_numel`` elements are in flight. A step with its backwards is one ``Walk``, each module's evaluation
    another.
    """

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        read: Callable[[int, Tensor], Callable[[], None]],
        *,
        max_ahead: int,
        max_numel: int,
    ) -> None:
        super().__init__(buckets)
        self.read = read
        self.max_ahead = max_ahead
        self.max_numel = max_numel
        self.training = Walk()
        self.evaluations: dict[Hashable, Walk] = {}
        self._evaluation: Walk | None = None
        self.in_flight: dict[int, Callable[[], None]] = {}
        self.prefetched = 0  # gathers already in flight when needed

    def begin_pass(self, phase: Phase, root: Hashable) -> None:
        if phase is Phase.EVALUATION:
            self._evaluation = self.evaluations.setdefault(root, Walk())

    def end_pass(self, phase: Phase) -> None:
        if phase is Phase.EVALUATION and self._evaluation is not None:
            self._evaluation.restart()
            self._evaluation = None
            self._finish_all()

    def gather(self, index: int, phase: Phase = Phase.FORWARD) -> None:
        walk = self.training if phase.trains else self._evaluation if phase is Phase.EVALUATION else None
        if walk is not None:
            walk.use(index)
        if index in self.in_flight:
            self.prefetched += 1
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
        for index in walk.order[walk.cursor : walk.cursor + self.max_ahead]:
            bucket = self.buckets[index]
            if len(self.in_flight) >= self.max_ahead or bucket.layout.padded_numel > self.max_numel:
                return
            if bucket.status is Status.SHARDED and index not in self.in_flight:
                self._start(index)

    def end_of_step(self) -> None:
        with self.lock:
            for index in list(self.in_flight):  # read ahead but not used: the weights are about to change
                self._finish(index)
                self.transitions.evict(index)
            self.training.restart()

    def abandon(self) -> None:
        self._finish_all()
        self.training = Walk(order=self.training.order)

    def settle(self) -> None:
        self._finish_all()


class FetchingGather(LocalGather):
    """Gatherer that fetches every bucket one-sidedly when needed. Used on CPUs, where this costs no more than a
    collective."""

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
