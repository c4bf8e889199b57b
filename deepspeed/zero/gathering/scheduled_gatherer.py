"""Gather by collectives that all ranks launch in one order, ahead of use: the default on accelerators.

[Note: which order] All ranks run a training step together, so at its end they agree on one order of gathers and sums
for the next step (Note: one order in ``launch_order.py``). One broadcast per step carries a changed order, or says
that there is no change.

An evaluation, a generated token or ``GatheredParameters`` may run on a single rank. Before its first gather, such a
pass asks whether all ranks are about to run the same pass (``rendezvous.py``): the same module, the same buckets
already gathered, the same weights, the same position in the training order. If so, all follow the order of rank 0's
previous such pass, and launch the rest of it at the end of the pass; otherwise each rank fetches one-sidedly. Since
all ranks are at the same position of the training order, the collectives of the pass have one place in it too. Asking
costs one small message to rank 0 and one back per pass, no collective, and nothing if everything is already gathered.
A rank waits for the others up to ``PATIENCE_S``, a quarter as long after each failed wait, and the full time again
after a success: a rank that evaluates alone loses little, and ranks that drifted apart meet again, because the last
to arrive waits longest. Buckets in the order that a pass does not use are gathered and resharded at its end, as the
other ranks wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.zero.gathering.gatherers import FetchingGatherer
from deepspeed.zero.gathering.launch_order import (
    EntryKind,
    LaunchEntry,
    LaunchOrder,
    decode,
    encode,
    with_prefetch,
)
from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gathering.rendezvous import Arrival
from deepspeed.zero.gathering.shard_servers import ShardServers
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket, Status

PATIENCE_S = 1.0
MIN_PATIENCE_S = 0.02
_REMEMBERED_PASSES = 64


@dataclass(slots=True)
class GatherCounts:
    """Gather counters: ``collectives`` launched, and by needed bucket ``hits`` (already in flight), ``misses``
    (launched only when needed) and ``fetches`` (one-sided, from the other ranks)."""

    collectives: int = 0
    hits: int = 0
    misses: int = 0
    fetches: int = 0


@dataclass(slots=True)
class Evaluation:
    """A pass outside the training step. ``order``: the one that all ranks follow, empty if there is none, None before
    the rendezvous."""

    root: Hashable
    intent: tuple[Hashable, ...] = ()
    order: LaunchOrder | None = None
    observed: list[int] = field(default_factory=list)


class GatherChannel(Protocol):
    """The ranks among which a bucket is gathered."""

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        """Gather the shards of all ranks into ``output`` [padded_numel]; ``input`` [shard_numel] is this rank's."""
        ...


class ScheduledGatherer(FetchingGatherer):
    """Gatherer whose collectives follow an agreed order (Note: which order), prefetching up to ``prefetch_numel``
    elements.

    ``all_ranks`` joins all ranks that take a step together; ``channels``, by bucket, those that hold one copy of its
    weights.
    """

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        channels: Sequence[GatherChannel],
        server: ShardServers,
        *,
        prefetch_numel: int,
        all_ranks: Communicator,
    ) -> None:
        super().__init__(buckets, server)
        self.turns = self
        self.channels = channels
        self.all_ranks = all_ranks
        self.prefetch_numel = prefetch_numel
        self.order = LaunchOrder()
        self.counts = GatherCounts()
        self.start_sum: Callable[[int], None] = lambda b: None  # the reducer's
        self.longest_patience_s = self.patience_s = PATIENCE_S
        self.in_flight: dict[int, Pending] = {}  # oldest first
        self._ahead = 0  # elements of these buckets
        self._complete: set[int] = set()  # full buckets whose sum waits for its turn
        self._evaluation: Evaluation | None = None
        self._last_orders: dict[Hashable, list[int]] = {}
        self._last_record: list[list[LaunchEntry]] = []

    # Needs --------------------------------------------------------------------------------------------------

    def gather(self, index: int, phase: Phase = Phase.FORWARD) -> None:
        prefetched = index in self.in_flight
        launched = self.counts.collectives
        order: LaunchOrder | None = None
        if phase.trains:
            order = self.order
            order.record[-1].append(LaunchEntry(EntryKind.NEED, index))
            if not prefetched:
                self._launch_up_to(order.find(index, beyond_sums=phase is not Phase.FORWARD))
        elif phase is Phase.EVALUATION and self._evaluation is not None:
            order = self._need_in_evaluation(self._evaluation, index)
        elif phase is Phase.MANUAL and not prefetched and self._rendezvous_by_hand(index):
            self._launch_gather(index)
        self._make_whole(index, phase, prefetched, launched)
        if order is not None:
            self._advance(order)

    def _make_whole(self, index: int, phase: Phase, prefetched: bool, launched: int) -> None:
        self.finish(index)
        if self.buckets[index].status is Status.SHARDED:
            self.counts.fetches += 1
            super().gather(index, phase)
        elif prefetched:
            self.counts.hits += 1
        else:
            assert self.counts.collectives > launched
            self.counts.misses += 1

    def finish(self, index: int) -> None:
        if index in self.in_flight:
            older = list(self.in_flight)[: list(self.in_flight).index(index) + 1]
            for i in older:  # skipped buckets become idle, and are resharded when memory is needed
                self._finish(i)

    def resharded(self, index: int) -> None:
        if self.order.begun:
            self.order.record[-1].append(LaunchEntry(EntryKind.RESHARD, index))

    # Launching ----------------------------------------------------------------------------------------------

    def _launch_up_to(self, count: int) -> None:
        """Launch the next ``count`` entries, of which the last is needed; this rank skipped the others, and keeps
        only those that fit in the prefetch window."""
        for left in range(count, 0, -1):
            entry = self.order.upcoming()
            assert entry is not None
            fits = entry.kind is EntryKind.NEED and (
                self._ahead + self.buckets[entry.bucket].layout.padded_numel <= self.prefetch_numel
            )
            self._launch(self.order, 1, keep=left == 1 or fits)

    def _launch(self, order: LaunchOrder, count: int, *, keep: bool) -> None:
        """Launch the next ``count`` entries of an order, whether this rank needs them or not."""
        for _ in range(count):
            entry = order.advance()
            if entry.kind is EntryKind.NEED:
                self._launch_gather(entry.bucket, keep=keep)
            elif entry.kind is EntryKind.SUM:
                self._complete.discard(entry.bucket)
                self.start_sum(entry.bucket)

    def _launch_gather(self, index: int, *, keep: bool = True) -> None:
        bucket = self.buckets[index]
        self.counts.collectives += 1
        if bucket.status is Status.SHARDED and keep:
            full = self.transitions.begin(index)
            self.in_flight[index] = self.channels[index].all_gather(full, bucket.device_shard())
            self._ahead += bucket.layout.padded_numel
            return
        # Already whole here, or not needed: other ranks still need this rank's shard.
        spare = torch.empty(bucket.layout.padded_numel, dtype=bucket.layout.dtype, device=bucket.device)
        self.channels[index].all_gather(spare, bucket.stored_shard().to(bucket.device)).wait()

    def _advance(self, order: LaunchOrder) -> None:
        """Launch the next entries that are ready: gathers within the prefetch window, sums of full buckets."""
        ahead = self._ahead
        while (entry := order.upcoming()) is not None:
            if entry.kind is EntryKind.NEED:
                bucket = self.buckets[entry.bucket]
                ahead += bucket.layout.padded_numel
                if ahead > self.prefetch_numel or bucket.status is not Status.SHARDED:
                    return
            elif entry.kind is EntryKind.SUM and entry.bucket not in self._complete:
                return
            self._launch(order, 1, keep=True)

    def _finish(self, index: int) -> None:
        pending = self.in_flight.pop(index)
        self._ahead -= self.buckets[index].layout.padded_numel
        self.complete(index, pending.wait)

    # Sums (``LaunchTurns`` of the reducer) ------------------------------------------------------------------

    def sum_ready(self, b: int) -> None:
        with self.lock:
            self.order.record[-1].append(LaunchEntry(EntryKind.SUM, b))
            if not self.order.entries:
                self.start_sum(b)
                return
            self._complete.add(b)
            self._advance(self.order)

    def end_segment(self) -> None:
        with self.lock:
            self._launch_rest()
            self.order.end_segment()

    def _launch_rest(self) -> None:
        self._launch(self.order, len(self.order.entries) - self.order.cursor, keep=False)
        self._complete.clear()
        for index in list(self.in_flight):
            self._finish(index)

    # Passes -------------------------------------------------------------------------------------------------

    def begin_pass(self, phase: Phase, root: Hashable) -> None:
        if phase is Phase.EVALUATION:
            self._evaluation = Evaluation(root)

    def end_pass(self, phase: Phase) -> None:
        if phase is Phase.FORWARD:
            self._launch(self.order, self.order.end_pass(), keep=False)
        elif phase is Phase.EVALUATION and self._evaluation is not None:
            self._end_evaluation(self._evaluation)
            self._evaluation = None

    def _need_in_evaluation(self, evaluation: Evaluation, index: int) -> LaunchOrder:
        """Launch the gathers through that of bucket ``index``, if it is one of the agreed order, which is returned."""
        if evaluation.order is None:
            evaluation.intent = (evaluation.root, *self._whole())
            proposal = self._last_orders.get(evaluation.intent, [])
            agreed = self._rendezvous(evaluation.intent, proposal)
            evaluation.order = LaunchOrder([LaunchEntry(EntryKind.NEED, b) for b in agreed])
        evaluation.observed.append(index)
        if index not in self.in_flight:
            self._launch(evaluation.order, evaluation.order.find(index, beyond_sums=True), keep=True)
        return evaluation.order

    def _end_evaluation(self, evaluation: Evaluation) -> None:
        order = evaluation.order
        if order is None:
            return  # nothing was gathered
        self._launch(order, len(order.entries) - order.cursor, keep=False)
        launched = {entry.bucket for entry in order.entries}
        for index in [i for i in self.in_flight if i in launched]:
            self._finish(index)
        while len(self._last_orders) >= _REMEMBERED_PASSES:
            self._last_orders.pop(next(iter(self._last_orders)))
        self._last_orders[evaluation.intent] = evaluation.observed

    def _whole(self) -> list[int]:
        return [i for i, b in enumerate(self.buckets) if b.status is not Status.SHARDED and not b.persistent]

    def _rendezvous_by_hand(self, index: int) -> bool:
        """Return whether all ranks gather this bucket by hand now. Gathers by hand are exact, so a bucket whose
        collective rounds is fetched instead."""
        return self.server.is_exact(index) and bool(self._rendezvous(("by hand", index), [index]))

    def _rendezvous(self, intent: tuple[Hashable, ...], proposal: list[int]) -> list[int]:
        """Return the order of a pass that all ranks are running now; empty if they are not."""
        what = repr((intent, self.order.position, self.server.version))
        order = self.server.meet(Arrival(what, proposal, self.patience_s))
        if order is not None:
            self.patience_s = self.longest_patience_s
            return order
        self.patience_s = max(MIN_PATIENCE_S, self.patience_s / 4)
        return []

    # Steps --------------------------------------------------------------------------------------------------

    def end_of_step(self) -> None:
        with self.lock:
            prefetched = list(self.in_flight)
            self._launch_rest()
            for index in prefetched:  # prefetched but not used: the weights are about to change
                self.transitions.evict(index)
            self._agree()

    def abandon(self) -> None:
        """Launch the rest of the segment, so that all ranks are at the same position, and restart the step."""
        with self.lock:
            if self.order.begun:
                self._launch_rest()
            self._complete.clear()
            self._evaluation = None
            self.order.restart()

    def set_prefetch(self, prefetch_numel: int) -> None:
        with self.lock:
            self.prefetch_numel = prefetch_numel
            self._last_record, self._last_orders = [], {}
            self.order.end_step([])

    def settle(self) -> None:
        """Complete everything in flight on any rank, before the buckets are dissolved. Collective."""
        begun = torch.tensor([int(self.order.begun)], dtype=torch.int64, device=self.buckets[0].device)
        self.all_ranks.all_reduce_max(begun).wait()
        self.start_sum = lambda b: None
        if begun.item():
            self._launch_rest()
        self.order.agreed = []
        self.order.restart()

    def _agree(self) -> None:
        """Make rank 0's record the order of the next step: broadcast its length, then, if changed, the order itself."""
        record = self.order.record
        device = self.buckets[0].device
        message: list[int] = []
        changed = self.all_ranks.rank == 0 and record != self._last_record
        if changed:
            numels = [bucket.layout.padded_numel for bucket in self.buckets]
            message = encode([with_prefetch(entries, numels, self.prefetch_numel) for entries in record])
        header = torch.tensor([len(message) if changed else -1], dtype=torch.int64, device=device)
        self.all_ranks.broadcast(header, src=0).wait()
        length = int(header.item())
        self._last_record = record
        if length < 0:
            self.order.end_step(self.order.agreed)
            return
        body = torch.zeros(length, dtype=torch.uint8, device=device)
        if changed:
            body.copy_(torch.tensor(message, dtype=torch.uint8))
        self.all_ranks.broadcast(body, src=0).wait()
        self.order.end_step(decode(body.tolist()))
