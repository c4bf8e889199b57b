"""Which bucket is needed when: gathers before use, releases after it, within the documented budgets.

[Note: use in forward] A hooked module's call is a *frame*; a bucket is in use while a frame that needs it is open.
Idle buckets are released lazily, when another one has to be gathered: the leaf modules of one block, or the
modules between two blocks, come one after another, and the memory is due only when the next unit begins.

[Note: use in backward] Autograd runs nodes in the reverse order of their creation. Every call remembers the clock
at its entry and exit; a hook on its outputs makes its buckets active again, and then every active call that
*entered after this one's exit* is done: its nodes were all created later. Calls of one graph task end with it, so
recomputation (which runs forward hooks, and in the reentrant kind nested graph tasks) cannot leak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from deepspeed.runtime.zero.sharded_bucket import ShardedBucket, Status
from deepspeed.runtime.zero.trace import UseTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBudget:
    """Elements: at most ``max_live`` gathered at once beyond what is in use, kept if reused within ``max_reuse``."""

    max_live: int
    max_reuse: int


@dataclass(slots=True)
class Frame:
    """One call of one hooked module: what it needs, and when it began and ended on the coordinator's clock."""

    needs: list[int]
    held: list[int]
    enter: int
    exit: int = -1
    graph_task: int = field(default=-1)


class ParamCoordinator:
    """Gathers and releases ``buckets`` (trainable and frozen). ``gather(i)`` brings the slices of bucket i."""

    def __init__(
        self, buckets: Sequence[ShardedBucket], gather: Callable[[int], None], budget: LiveBudget
    ) -> None:
        self.buckets = list(buckets)
        self.gather = gather
        self.budget = budget
        self.trace = UseTrace([b.layout.padded_numel for b in self.buckets])
        self.frames: list[Frame] = []
        self.active: list[Frame] = []
        self._uses = [0] * len(self.buckets)
        self._kept: set[int] = set()
        self._clock = 0
        self._tasks: set[int] = set()
        self.keeps_all = sum(b.layout.padded_numel for b in self.buckets) <= min(
            budget.max_live, budget.max_reuse
        )

    # Forward ------------------------------------------------------------------------------------------------

    def enter(self, needs: list[int]) -> None:
        self._clock += 1
        frame = Frame(needs, [], self._clock)
        self.frames.append(frame)
        for b in needs:
            self._hold(frame, b)

    def _hold(self, frame: Frame, b: int) -> None:
        frame.held.append(b)
        self._uses[b] += 1
        self._require(b)

    def leave(self) -> Frame:
        self._clock += 1
        frame = self.frames.pop()
        frame.exit = self._clock
        for b in frame.held:
            self._uses[b] -= 1
        if not self.frames and not self._tasks:
            self._end_of_forward()
        return frame

    def touch(self, b: int) -> None:
        """A module reads a parameter of bucket ``b`` that is not its own: from now on it needs that bucket."""
        frame = self.frames[-1]
        if b not in frame.held:
            if b not in frame.needs:
                frame.needs.append(b)
            self._hold(frame, b)

    def hold(self, b: int) -> None:
        """Keep bucket ``b`` gathered until ``drop`` (``GatheredParameters`` over all of it)."""
        self._uses[b] += 1
        self._require(b)

    def drop(self, b: int) -> None:
        self._uses[b] -= 1
        if not self._uses[b] and not self.keeps_all:
            self.release(b)

    def keep(self, buckets: Sequence[int]) -> None:
        """Let these stay gathered until the weights change, or ``release_all``."""
        for b in set(buckets) - self._kept:
            self._uses[b] += 1
            self._kept.add(b)

    def _let_go(self) -> None:
        for b in self._kept:
            self._uses[b] -= 1
        self._kept.clear()

    def _end_of_forward(self) -> None:
        if not torch.is_grad_enabled():
            self._release_idle(keep_near=False)

    # Backward -----------------------------------------------------------------------------------------------

    def backward(self, frame: Frame) -> None:
        """Autograd reached an output of this call (Note: use in backward)."""
        task = torch._C._current_graph_task_id()
        self._open_task(task)
        self._finish(lambda other: other.graph_task == task and other.enter > frame.exit)
        if frame.graph_task != task:
            frame.graph_task = task
            self.active.append(frame)
            for b in frame.held:
                self._uses[b] += 1
        for b in frame.held:
            self._require(b)

    def _open_task(self, task: int) -> None:
        if task in self._tasks:
            return
        self._tasks.add(task)

        def close() -> None:
            self._tasks.discard(task)
            self._finish(lambda frame: frame.graph_task == task)
            if not self._tasks and not self.frames:
                self._release_idle()

        torch.autograd.Variable._execution_engine.queue_callback(close)

    def _finish(self, done: Callable[[Frame], bool]) -> None:
        if not any(map(done, self.active)):
            return
        for frame in filter(done, self.active):
            for b in frame.held:
                self._uses[b] -= 1
            frame.graph_task = -1
        self.active = [frame for frame in self.active if frame.graph_task >= 0]

    # Gathering and releasing --------------------------------------------------------------------------------

    def _require(self, b: int) -> None:
        self.trace.use(b)
        bucket = self.buckets[b]
        if bucket.status is Status.GATHERED:
            return
        if not self.keeps_all:
            self._release_idle(incoming=bucket.layout.padded_numel)
        self.gather(b)

    def _release_idle(self, incoming: int = 0, keep_near: bool = True) -> None:
        if self.keeps_all:
            return
        live = incoming + self._live()
        for b, bucket in enumerate(self.buckets):
            if bucket.persistent or self._uses[b] or bucket.status is not Status.GATHERED:
                continue
            near = keep_near and self.trace.distance(b) <= self.budget.max_reuse
            if near and live <= self.budget.max_live:
                continue
            self.release(b)
            live -= bucket.layout.padded_numel

    def release(self, b: int) -> None:
        bucket = self.buckets[b]
        if bucket.status is Status.GATHERED and not bucket.persistent:
            bucket.release()

    def _live(self) -> int:
        """Elements of gathered buckets that could be released."""
        return sum(
            b.layout.padded_numel for b in self.buckets if b.status is Status.GATHERED and not b.persistent
        )

    def end_of_step(self) -> None:
        """The weights have changed; ``publish`` has released what was gathered."""
        self._let_go()
        self.trace.end_of_step()

    def release_all(self) -> None:
        self._let_go()
        for b in range(len(self.buckets)):
            if not self._uses[b]:
                self.release(b)

    # Documented names that clients call ---------------------------------------------------------------------

    def is_invalid_trace(self) -> bool:
        return False

    def is_complete_trace(self) -> bool:
        return self.trace.complete

    def is_record_trace(self) -> bool:
        return not self.trace.complete

    def _invalidate_trace(self) -> None:
        """Forget the recorded order (a forward ran without hooks, or modules changed)."""
        self.trace.forget()
        self.frames.clear()
        self._finish(lambda _: True)
        self._uses = [0] * len(self.buckets)
        self._kept.clear()

    reset_step = end_of_step
