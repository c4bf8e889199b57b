"""Decide when a bucket is whole. This is the only place that does; every holder of a bucket reports here.

[Note: the states of a bucket]

```
             begin                    arrived
   SHARDED ---------> GATHERING ----------------> GATHERED: held, idle or persistent
      ^                   | arrived(failed)           |
      +-------------------+- reshard (idle), evict ---+
```

GATHERED has three kinds. *Held*: it has at least one holder. *Idle*: it has none; its memory may be freed at any
time. *Persistent*: a small bucket, whole from the first step to the last; its holders are not counted.

| holder | from | to |
|---|---|---|
| a call of a module (any phase of a forward) | its entry: ``take`` | its exit: ``release`` |
| a backward, for each call whose nodes it runs | reaching the call: ``take`` | passing it, or its end: ``release`` |
| ``GatheredParameters`` over a whole bucket | ``hold`` | ``release_hold`` |
| a forward under a transform (``torch.func``) | ``keep`` | the update, or ``reshard_all`` |

An idle bucket is not resharded at once, except after ``release_hold``: the next call often needs it again. It is
resharded

- when another bucket is about to be gathered, or the last backward ends, if more than ``max_live`` elements are live or
  its next use in the order of the last step is more than ``max_reuse`` elements away;
- at the end of an evaluation, whatever its next use: the order of training steps does not predict it;
- when a training step begins after an evaluation or a hold, so that every step begins with the same buckets;
- by ``reshard_all``.

An update *evicts* a bucket despite its holders, since its copy is stale. It is gathered again at its next use.

The gatherer (``gatherers.py``, ``scheduled_gatherer.py``) moves the shards. It may ``begin`` a gather ahead of need; it
never reshards. Any transition outside the diagram is a ``TransitionError``.

[Note: threads] Every transition happens under ``lock``. Weights are published while no other thread is inside a
forward (``exclude_forwards``), so such a forward never loses a bucket midway.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from deepspeed.base.exceptions import ExplainedError
from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket, Status

if TYPE_CHECKING:
    from deepspeed.zero.gradients.reducer import LaunchTurns

# The order of bucket uses in the last step, which predicts the next use. Pure.


NEVER = sys.maxsize


class UseTrace:
    """Records uses of buckets and follows the record of the previous step.

    A changed order is followed: the cursor moves to the next occurrence of the used bucket, and the new record
    replaces the old trace at the end of the step.
    """

    def __init__(self, numels: Sequence[int]) -> None:
        self.numels = list(numels)
        self._last: list[int] = []
        self._now: list[int] = []
        self._cursor = 0

    @property
    def total(self) -> int:
        """Return the number of elements of all buckets."""
        return sum(self.numels)

    @property
    def complete(self) -> bool:
        return bool(self._last)

    @property
    def begun(self) -> bool:
        """Return whether any bucket was used in this step."""
        return bool(self._now)

    def use(self, b: int) -> None:
        if self._now and self._now[-1] == b:
            return
        self._now.append(b)
        for position in range(self._cursor, len(self._last)):
            if self._last[position] == b:
                self._cursor = position + 1
                return

    def upcoming(self, most: int) -> list[int]:
        """Return the next ``most`` buckets in the order of the last step."""
        return self._last[self._cursor : self._cursor + most]

    def distance(self, b: int) -> int:
        """Return the number of elements used before the next use of bucket ``b``; NEVER if there is none, or no trace
        yet."""
        passed = 0
        for other in self._last[self._cursor :]:
            if other == b:
                return passed
            passed += self.numels[other]
        return NEVER

    def end_of_step(self) -> None:
        if self._now:
            self._last, self._now = self._now, []
        self._cursor = 0

    def restart(self) -> None:
        """Restart the step and discard its record so far."""
        self._now, self._cursor = [], 0

    def forget(self) -> None:
        self._last, self._now, self._cursor = [], [], 0


class TransitionError(ExplainedError, RuntimeError):
    """A transition that the state of a bucket does not allow: a bug in this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBudget:
    """Limits in elements: at most ``max_live`` gathered at once, except buckets in use; idle ones are kept if reused
    within ``max_reuse``."""

    max_live: int
    max_reuse: int


class Gatherer:
    """Base of what moves the shards of ``buckets`` for the ``Transitions`` that it is connected to: see
    `zero/gathering/gatherers.py`."""

    turns: LaunchTurns | None = None
    """Decides whose turn it is, if the gathers are collectives that share one order with the gradient sums."""

    def __init__(self, buckets: Sequence[ShardedBucket]) -> None:
        self.buckets = list(buckets)

    def connect(self, transitions: Transitions) -> None:
        """Connect to ``transitions``, which requests gathers and is notified of the beginning and end of each."""
        self.transitions = transitions
        self.lock = transitions.lock

    def complete(self, index: int, wait: Callable[[], object]) -> None:
        """End the gather of bucket ``index``, whose last shards arrive in ``wait``."""
        try:
            wait()
        except BaseException:
            self.transitions.arrived(index, failed=True)
            raise
        self.transitions.arrived(index)

    def gather(self, index: int, phase: Phase = Phase.FORWARD) -> None:
        """Make bucket ``index`` whole; on return it is GATHERED."""
        raise NotImplementedError

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

    def shards_written(self) -> None:
        """Note that every rank has written its shards."""

    def set_prefetch(self, prefetch_numel: int) -> None:
        """Set the prefetch window in elements and forget the order of the last step. Called on all ranks between two
        steps; no effect without prefetching."""

    def settle(self) -> None:
        """Complete everything in flight, before the buckets are dissolved. Called by all ranks."""

    def close(self) -> None:
        """Close; no more gathers will follow."""


class Transitions:
    """Owner of the holder counts of ``buckets`` and of all changes of their state (Note: the states of a bucket)."""

    def __init__(self, buckets: Sequence[ShardedBucket], gatherer: Gatherer, budget: LiveBudget) -> None:
        self.buckets = list(buckets)
        self.gatherer = gatherer
        self.budget = budget
        self.lock = threading.RLock()
        self.trace = UseTrace([bucket.layout.padded_numel for bucket in self.buckets])
        self.holders = [0] * len(self.buckets)
        self.evaluating = False  # an evaluation is open on the training thread
        self.fits_budget = self.trace.total <= min(budget.max_live, budget.max_reuse)
        self._kept: set[int] = set()
        self._gathered_outside_training: set[int] = set()  # since the last step
        self._passes = 0
        self._backwards = 0
        self._other_threads: set[int] = set()  # other threads than the training one that are in a forward
        self._publishers = 0  # threads that wait for ``_other_threads`` to be empty
        self._threads_changed = threading.Condition(self.lock)
        gatherer.connect(self)

    # Phases -------------------------------------------------------------------------------------------------

    def begin_pass(self, phase: Phase, root: Hashable) -> None:
        """Begin an outermost call, of module ``root``, on this thread."""
        self._passes += 1
        if phase is Phase.OTHER_THREAD:
            self._threads_changed.wait_for(lambda: not self._publishers)
            self._other_threads.add(threading.get_ident())
        elif phase is Phase.FORWARD:
            if self._gathered_outside_training:
                self._release_outside_training()
        elif phase is Phase.EVALUATION:
            self.evaluating = True
        self.gatherer.begin_pass(phase, root)

    def _release_outside_training(self) -> None:
        """Reshard what was gathered outside training, so that every step begins with the same buckets and is
        predictable."""
        if not self.trace.begun:
            for b in self._gathered_outside_training:
                self._reshard_if_idle(b)
        self._gathered_outside_training.clear()

    def end_pass(self, phase: Phase) -> None:
        if not self._passes:
            raise TransitionError(f"{phase.name} ended, but no pass is open")
        self._passes -= 1
        if phase is Phase.OTHER_THREAD:
            self._other_threads.discard(threading.get_ident())
            self._threads_changed.notify_all()
        elif phase is Phase.EVALUATION:
            self.evaluating = False
        self.gatherer.end_pass(phase)
        if not (phase.trains or self._passes or self._backwards):
            self._reshard_idle(keep_near=False)

    def cancel_pass(self, phase: Phase) -> None:
        """Cancel a pass that an exception ended before ``end_pass``."""
        self._passes -= 1
        self._other_threads.discard(threading.get_ident())
        if phase is Phase.EVALUATION:
            self.evaluating = False

    def begin_backward(self) -> None:
        self._backwards += 1

    def end_backward(self, *, failed: bool = False) -> None:
        if not self._backwards:
            raise TransitionError("a backward ended, but none is running")
        self._backwards -= 1
        if not (failed or self._backwards or self._passes):
            self._reshard_idle()

    @contextlib.contextmanager
    def exclude_forwards(self) -> Iterator[None]:
        """Wait until no other thread is inside a forward, and let none begin, while weights change."""
        with self.lock:
            self._publishers += 1
            try:
                while self._other_threads & {thread.ident for thread in threading.enumerate()}:
                    self._threads_changed.wait(timeout=0.5)  # a thread may die inside a forward
            finally:
                self._publishers -= 1
            try:
                yield
            finally:
                self._threads_changed.notify_all()

    # HolderGroups ------------------------------------------------------------------------------------------------

    def take(self, needs: Sequence[int], phase: Phase) -> None:
        """Add a holder to each of ``needs``, which are whole on return."""
        holders = self.holders
        for b in needs:
            holders[b] += 1
        self.need(needs, phase)

    def need(self, needs: Sequence[int], phase: Phase) -> None:
        """Make ``needs`` whole for an existing holder."""
        for b in needs:
            if phase.trains:
                self.trace.use(b)
            bucket = self.buckets[b]
            if bucket.status is Status.GATHERED:
                continue
            if not self.fits_budget:
                self._reshard_idle(incoming=bucket.layout.padded_numel)
            self.gatherer.gather(b, phase)
            if not phase.trains:
                self._gathered_outside_training.add(b)

    def release(self, held: Iterable[int]) -> None:
        """Remove a holder from each of ``held``; they stay whole while there is room."""
        holders = self.holders
        for b in held:
            if not holders[b]:
                raise TransitionError(f"bucket {b} was released more often than taken")
            holders[b] -= 1

    def discard_lossy_copy(self, b: int) -> None:
        """Reshard an idle bucket whose gather rounds, before a gather by hand, which must see the exact weights."""
        with self.lock:
            if self.buckets[b].lossy:
                self.gatherer.finish(b)
                self._reshard_if_idle(b)

    def hold(self, b: int) -> None:
        """Gather by hand, and hold until ``release_hold``."""
        with self.lock:
            self.take((b,), Phase.MANUAL)

    def release_hold(self, b: int) -> None:
        with self.lock:
            self.release((b,))
            if not self.fits_budget or self.buckets[b].lossy:
                self._reshard_if_idle(b)

    def keep(self, buckets: Iterable[int]) -> None:
        """Hold these buckets until the weights change, or ``reshard_all``."""
        with self.lock:
            for b in set(buckets) - self._kept:
                self.holders[b] += 1
                self._kept.add(b)

    def release_kept(self) -> None:
        self.release(self._kept)
        self._kept.clear()

    # What the gatherer reports -------------------------------------------------------------------------------

    def begin(self, b: int) -> Tensor:
        """SHARDED -> GATHERING; return the buffer [padded_numel] to fill."""
        bucket = self.buckets[b]
        if bucket.status is not Status.SHARDED:
            raise TransitionError(f"bucket {b} is {bucket.status.name}: only a SHARDED one can be gathered")
        return bucket.allocate()

    def arrived(self, b: int, *, failed: bool = False) -> None:
        """GATHERING -> GATHERED: the buffer holds every shard. ``failed``: GATHERING -> SHARDED, as it holds only some,
        which a later use would take for the weights."""
        bucket = self.buckets[b]
        if bucket.status is not Status.GATHERING:
            raise TransitionError(f"bucket {b} is {bucket.status.name}: no gather is in flight")
        if failed:
            bucket.failed()
        else:
            bucket.arrived()

    # Resharding ---------------------------------------------------------------------------------------------

    def evict(self, b: int) -> None:
        """GATHERED -> SHARDED despite holders, because the weights change or the memory is needed. Persistent buckets
        are refreshed instead; a gather in flight is ended by the gatherer."""
        bucket = self.buckets[b]
        if bucket.status is Status.GATHERED and not bucket.persistent:
            bucket.reshard()

    def evict_stale(self, b: int) -> None:
        """Evict a bucket whose weights change, once no other thread is using it."""
        with self.lock:
            if self._other_threads:
                with self.exclude_forwards():
                    self.evict(b)
            else:
                self.evict(b)

    def reshard_all(self) -> None:
        """Reshard every idle bucket."""
        with self.lock:
            self.release_kept()
            for b in range(len(self.buckets)):
                self._reshard_if_idle(b)

    def _reshard_if_idle(self, b: int) -> None:
        bucket = self.buckets[b]
        if not self.holders[b] and bucket.status is Status.GATHERED and not bucket.persistent:
            bucket.reshard()
            self.gatherer.resharded(b)

    def _reshard_idle(self, incoming: int = 0, keep_near: bool = True) -> None:
        if self.fits_budget:
            return
        live = incoming + self.live()
        for b, bucket in enumerate(self.buckets):
            if bucket.persistent or self.holders[b] or bucket.status is not Status.GATHERED:
                continue
            near = keep_near and self.trace.distance(b) <= self.budget.max_reuse
            if near and live <= self.budget.max_live:
                continue
            bucket.reshard()
            self.gatherer.resharded(b)
            live -= bucket.layout.padded_numel

    def live(self) -> int:
        """Return the number of elements of gathered buckets, persistent ones excluded."""
        return sum(
            b.layout.padded_numel for b in self.buckets if b.status is Status.GATHERED and not b.persistent
        )

    def set_persistent(self, b: int, persistent: bool) -> None:
        """Make a bucket persistent, or an ordinary one again, between two steps. Collective."""
        bucket = self.buckets[b]
        with self.lock:
            if persistent:
                self._make_whole(b)
            bucket.persistent = persistent
            for param in bucket.params:
                param.ds_persist = persistent  # type: ignore[attr-defined]
            self._gathered_outside_training.discard(b)
            self._reshard_if_idle(b)

    def _make_whole(self, b: int) -> None:
        """Gather a bucket by hand, without a holder. Called by all ranks, of which some may have gathered it before."""
        if self.buckets[b].status is Status.SHARDED:
            self.gatherer.gather(b, Phase.MANUAL)

    # The end ------------------------------------------------------------------------------------------------

    def end_of_step(self) -> None:
        """End the step: the weights have changed and stale copies have been evicted."""
        self.release_kept()
        self._gathered_outside_training.clear()
        self.trace.end_of_step()

    def dissolve(self) -> None:
        """Gather every parameter permanently, into its own memory. Called by all ranks, of which some may have gathered
        a bucket before, and ended by now."""
        for b, bucket in enumerate(self.buckets):
            self.discard_lossy_copy(b)
            if bucket.shard is not None:
                self._make_whole(b)
            bucket.destroy()
