"""Gather the shards of a bucket without a common order of ranks: by copying, reading, or fetching."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket, Status
from deepspeed.zero.gathering.transitions import Gatherer, UseTrace

if TYPE_CHECKING:
    from deepspeed.zero.gathering.shard_servers import ShardServers


class LocalGatherer(Gatherer):
    """Gatherer of a single rank, whose shard is the whole bucket."""

    def gather(self, index: int, phase: Phase = Phase.FORWARD) -> None:
        shard = self.buckets[index].stored_shard()
        self.transitions.begin(index).copy_(shard)
        self.transitions.arrived(index)


class ReadingGatherer(Gatherer):
    """Gatherer of a single rank whose shards are in a file; reads ahead the next buckets in the order of the last
    step.

    ``read(i, full)`` starts to fill ``full`` and returns a function that completes it. At most ``max_ahead`` buckets of
    at most ``max_numel`` elements are in flight. A step with its backwards has one ``UseTrace``, each
    module's evaluation another.
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
        self._numels = [bucket.layout.padded_numel for bucket in buckets]
        self.training = UseTrace(self._numels)
        self.evaluations: dict[Hashable, UseTrace] = {}
        self._evaluation: UseTrace | None = None
        self.in_flight: dict[int, Callable[[], None]] = {}
        self.prefetched = 0  # gathers already in flight when needed

    def begin_pass(self, phase: Phase, root: Hashable) -> None:
        if phase is Phase.EVALUATION:
            self._evaluation = self.evaluations.setdefault(root, UseTrace(self._numels))

    def end_pass(self, phase: Phase) -> None:
        if phase is Phase.EVALUATION and self._evaluation is not None:
            self._evaluation.end_of_step()
            self._evaluation = None
            self._finish_all()

    def gather(self, index: int, phase: Phase = Phase.FORWARD) -> None:
        trace = self.training if phase.trains else self._evaluation if phase is Phase.EVALUATION else None
        if trace is not None:
            trace.use(index)
        if index in self.in_flight:
            self.prefetched += 1
        else:
            self._start(index)
        self._finish(index)
        if trace is not None:
            self._read_ahead(trace)

    def _start(self, index: int) -> None:
        full = self.transitions.begin(index)
        try:
            self.in_flight[index] = self.read(index, full)
        except BaseException:
            self.transitions.arrived(index, failed=True)
            raise

    def _finish(self, index: int) -> None:
        self.complete(index, self.in_flight.pop(index))

    def _finish_all(self) -> None:
        for index in list(self.in_flight):
            self._finish(index)

    def _read_ahead(self, trace: UseTrace) -> None:
        for index in trace.upcoming(self.max_ahead):
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
            self.training.end_of_step()

    def abandon(self) -> None:
        self._finish_all()
        self.training.restart()

    def settle(self) -> None:
        self._finish_all()


class FetchingGatherer(Gatherer):
    """Gatherer that fetches every bucket one-sidedly when needed. Used on CPUs, where this costs no more than a
    collective."""

    def __init__(self, buckets: Sequence[ShardedBucket], server: ShardServers) -> None:
        super().__init__(buckets)
        self.server = server

    def gather(self, index: int, phase: Phase = Phase.FORWARD) -> None:
        full = self.transitions.begin(index)
        self.complete(index, lambda: self.server.fetch(index, full, phase))

    def shards_written(self) -> None:
        self.server.advance()

    def close(self) -> None:
        self.server.retire()
