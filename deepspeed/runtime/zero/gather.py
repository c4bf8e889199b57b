"""How the slices of a bucket come together: on demand from the other ranks, or by collectives in an agreed order.

[Note: the gather schedule] Collectives must be issued in the same order by every rank, but which bucket a rank needs
next depends on its control flow. So the ranks agree on the order that rank 0 went through in the last step. A
rank that needs a bucket takes part in everything scheduled before it (and keeps what it may need); a bucket
that is not scheduled any more is fetched from the other ranks' servers, which needs nobody's cooperation; what
is left of the schedule at the end of the step is taken part in then. Sums use another process group, so the
order of gathers and sums among each other is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.runtime.zero.shard_server import ShardServer
from deepspeed.runtime.zero.sharded_bucket import ShardedBucket, Status


class LocalGather:
    """One rank: the slice is everything."""

    def __init__(self, buckets: Sequence[ShardedBucket]) -> None:
        self.buckets = list(buckets)

    def gather(self, index: int) -> None:
        """Make bucket ``index`` whole; on return it is GATHERED."""
        bucket = self.buckets[index]
        assert bucket.shard is not None
        bucket.allocate().copy_(bucket.shard)
        bucket.arrived()

    def end_of_step(self) -> None:
        """All backwards of a step are over, the weights are about to change."""

    def changed(self) -> None:
        """The slices were written, on every rank."""

    def close(self) -> None:
        """Nothing will be gathered any more."""


class ReadingGather(LocalGather):
    """One rank whose slices rest in a file: the next buckets in the order of the last step are read ahead.

    ``read(i, full)`` starts to fill ``full`` and returns what finishes it. At most ``ahead`` buckets of at most
    ``max_numel`` elements are under way.
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
        self.order: list[int] = []  # of the last step
        self.observed: list[int] = []
        self.cursor = 0
        self.in_flight: dict[int, Callable[[], None]] = {}

    def gather(self, index: int) -> None:
        if torch.is_grad_enabled():
            self.observed.append(index)
        if index not in self.in_flight:
            self._start(index)
        self._finish(index)
        if index in self.order[self.cursor :]:
            self.cursor = self.order.index(index, self.cursor) + 1
        self._read_ahead()

    def _start(self, index: int) -> None:
        self.in_flight[index] = self.read(index, self.buckets[index].allocate())

    def _finish(self, index: int) -> None:
        try:
            self.in_flight.pop(index)()
        finally:
            self.buckets[index].arrived()

    def _read_ahead(self) -> None:
        for index in self.order[self.cursor : self.cursor + self.ahead]:
            bucket = self.buckets[index]
            if len(self.in_flight) >= self.ahead or bucket.layout.padded_numel > self.max_numel:
                return
            if bucket.status is Status.SHARDED and index not in self.in_flight:
                self._start(index)

    def end_of_step(self) -> None:
        for index in list(self.in_flight):  # foreseen but not used: the weights are about to change
            self._finish(index)
            self.buckets[index].release()
        self.order, self.observed, self.cursor = self.observed, [], 0


class FetchingGather(LocalGather):
    """Every bucket is fetched when it is needed. The way on CPUs, where it costs no more than a collective."""

    def __init__(
        self, buckets: Sequence[ShardedBucket], communicator: Communicator, server: ShardServer
    ) -> None:
        super().__init__(buckets)
        self.communicator = communicator
        self.server = server

    def gather(self, index: int) -> None:
        bucket = self.buckets[index]
        full = bucket.allocate()
        self.server.fetch(index, full)
        bucket.arrived()
        # As many bytes leave this rank for the others' copies as come here.
        size = self.communicator.size
        self.communicator.collectives["fetch"] += 1
        self.communicator.bytes_sent += full.numel() * full.element_size() * (size - 1) // size

    def changed(self) -> None:
        self.server.advance()

    def close(self) -> None:
        self.server.retire()


class ScheduledGather(FetchingGather):
    """Collectives in the order of the last step, launched ahead up to ``prefetch_numel`` elements."""

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        communicator: Communicator,
        server: ShardServer,
        *,
        prefetch_numel: int,
    ) -> None:
        super().__init__(buckets, communicator, server)
        self.prefetch_numel = prefetch_numel
        self.schedule: list[int] = []
        self.cursor = 0
        self.observed: list[int] = []
        self.in_flight: dict[int, Pending] = {}

    def gather(self, index: int) -> None:
        if torch.is_grad_enabled():  # evaluations are not part of a step
            self.observed.append(index)
            self._take_part_until(index)
        if index in self.in_flight:
            self._finish(index)
        if self.buckets[index].status is Status.SHARDED:
            super().gather(index)
        if torch.is_grad_enabled():
            self._prefetch()

    def _take_part_until(self, index: int) -> None:
        """Launch what is scheduled up to bucket ``index``, if it is still to come."""
        if index in self.in_flight or index not in self.schedule[self.cursor :]:
            return
        stop = self.schedule.index(index, self.cursor) + 1
        while self.cursor < stop:
            self._launch_next()

    def _prefetch(self) -> None:
        ahead = sum(self.buckets[i].layout.padded_numel for i in self.in_flight)
        while self.cursor < len(self.schedule):
            coming = self.buckets[self.schedule[self.cursor]]
            ahead += coming.layout.padded_numel
            if ahead > self.prefetch_numel or coming.status is not Status.SHARDED:
                return
            self._launch_next()

    def _launch_next(self) -> None:
        index = self.schedule[self.cursor]
        self.cursor += 1
        bucket = self.buckets[index]
        assert bucket.shard is not None and bucket.full is not None
        if bucket.status is Status.SHARDED:
            full = bucket.allocate()
            self.in_flight[index] = self.communicator.all_gather(full, bucket.own_slice())
        else:  # whole here already; the others still need this rank's slice
            spare = torch.empty(bucket.layout.padded_numel, dtype=bucket.layout.dtype, device=bucket.device)
            self.communicator.all_gather(spare, bucket.shard.to(bucket.device)).wait()

    def _finish(self, index: int) -> None:
        self.in_flight.pop(index).wait()
        self.buckets[index].arrived()

    def end_of_step(self) -> None:
        while self.cursor < len(self.schedule):
            self._launch_next()
        for index in list(self.in_flight):
            self._finish(index)
        self._agree()
        self.cursor = 0
        self.observed = []

    def _agree(self) -> None:
        """Rank 0's observed order becomes the schedule: its length first, then, if it changed, the order."""
        device = self.buckets[0].device
        changed = self.observed != self.schedule
        header = torch.tensor([len(self.observed) if changed else -1], dtype=torch.int64, device=device)
        self.communicator.broadcast(header, src=0).wait()
        length = int(header.item())
        if length < 0:
            return
        order = torch.zeros(length, dtype=torch.int64, device=device)
        if self.communicator.rank == 0:
            order.copy_(torch.tensor(self.observed, dtype=torch.int64))
        self.communicator.broadcast(order, src=0).wait()
        self.schedule = order.tolist()
