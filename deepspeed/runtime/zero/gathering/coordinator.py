"""Decides when each bucket is needed: gathers before use, releases after it, within the documented budgets.

[Note: use in forward] A hooked module's call is a *frame*; a bucket is in use while a frame that needs it is open.
Idle buckets are released lazily, when another one has to be gathered: the leaf modules of one block, or the
modules between two blocks, run consecutively, and the memory is not needed until the next unit begins.

[Note: use in backward] Autograd runs nodes in the reverse order of their creation. Every call records the clock
at its entry and exit; a hook on its outputs marks its buckets as active again, and then every active call that
*entered after this one's exit* is done: its nodes were all created later. Calls of one graph task end with it, so
recomputation (which runs forward hooks, and in the reentrant kind nested graph tasks) cannot leak.

[Note: backward of a backward] With ``create_graph`` the nodes of a backward are themselves differentiated, and they
too have saved weights. A gradient can reach them only through what that backward produced: gradients of
parameters, of the model's inputs, or of its modules' outputs. Each of those gets a hook that keeps the buckets of that
backward gathered until the second backward ends.

[Note: threads] Each thread has its own frames; a bucket in use on any thread stays gathered. Only one thread issues
collectives (the one that takes the steps, and autograd's threads while they work for it), because the order in which
threads interleave differs from rank to rank. A forward on another thread fetches instead, and ends before new weights
are published, so it never loses a bucket midway.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed.runtime.backward import GraphTask
from deepspeed.runtime.zero.gathering.gather import LocalGather
from deepspeed.runtime.zero.gathering.phases import Phase
from deepspeed.runtime.zero.gathering.sharded_bucket import ShardedBucket, Status
from deepspeed.runtime.zero.gathering.trace import UseTrace

_OUTSIDE = -1  # not in any graph task


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
    phase: Phase = Phase.FORWARD
    exit: int = -1
    graph_task: int = field(default=_OUTSIDE)


class Backward:
    """A running graph task, and the buckets it needed if its own nodes may be differentiated again."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        self.task = GraphTask(at_end)
        self.needed: dict[int, None] = {}  # an ordered set
        self.handles: list[Any] = []

    def over(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []


class _Calls(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


class ParamCoordinator:
    """Gathers and releases ``buckets`` (trainable and frozen) through ``gatherer``."""

    def __init__(self, buckets: Sequence[ShardedBucket], gatherer: LocalGather, budget: LiveBudget) -> None:
        self.buckets = list(buckets)
        self.gatherer = gatherer
        self.budget = budget
        self.trace = UseTrace([b.layout.padded_numel for b in self.buckets])
        self.active: list[Frame] = []
        self.calls = _Calls()
        self._lock = gatherer.lock
        self._quiet = threading.Condition(self._lock)
        self._waiting = 0  # publishers waiting for other threads' passes to end
        self._trainer = threading.get_ident()
        self._uses = [0] * len(self.buckets)
        self._kept: set[int] = set()
        self._clock = 0
        self._open_passes = 0
        self._apart: set[int | None] = set()  # threads other than the trainer that are in a forward
        self._backwards: dict[int, Backward] = {}
        self._watched = WeakIdKeyDictionary()  # input tensors that have a hook
        self._left: set[int] = set()  # gathered outside training since the last step
        self.keeps_all = sum(b.layout.padded_numel for b in self.buckets) <= min(
            budget.max_live, budget.max_reuse
        )

    @property
    def frames(self) -> list[Frame]:
        """The open calls of this thread, outermost first."""
        return self.calls.frames

    # Forward ------------------------------------------------------------------------------------------------

    def enter(self, needs: list[int], phase: Phase = Phase.FORWARD, root: Hashable = None) -> None:
        """A call begins. ``phase`` applies to outermost calls; nested calls belong to the same pass, and a call
        inside backward is a recomputation."""
        frames = self.calls.frames
        with self._lock:
            phase = frames[0].phase if frames else self._phase_of(phase)
            if phase is Phase.APART and not frames:
                self._quiet.wait_for(lambda: not self._waiting)
            self._clock += 1
            frame = Frame(needs, [], self._clock, phase)
            frames.append(frame)
            if len(frames) == 1:
                self._begin_pass(phase, root)
            for b in needs:
                self._hold(frame, b)

    def _phase_of(self, phase: Phase) -> Phase:
        """What an outermost call belongs to."""
        if torch._C._current_graph_task_id() != _OUTSIDE:
            return Phase.RECOMPUTATION
        return phase if threading.get_ident() == self._trainer else Phase.APART

    def _begin_pass(self, phase: Phase, root: Hashable) -> None:
        self._open_passes += 1
        if phase is Phase.APART:
            self._apart.add(threading.get_ident())
        if phase is not Phase.RECOMPUTATION:
            self._forget_failed()
        if phase is Phase.FORWARD and self._left:
            # A step begins with the same buckets whether or not an evaluation preceded it: it can be predicted.
            for b in self._left if not self.trace.begun else ():
                if not self._uses[b]:
                    self.release(b)
            self._left.clear()
        self.gatherer.begin_pass(phase, root)

    def _hold(self, frame: Frame, b: int) -> None:
        frame.held.append(b)
        self._uses[b] += 1
        self._require(b, frame.phase)

    def leave(self) -> Frame:
        with self._lock:
            self._clock += 1
            frames = self.calls.frames
            frame = frames.pop()
            frame.exit = self._clock
            for b in frame.held:
                self._uses[b] -= 1
            if not frames:
                self._end_pass(frame.phase)
            return frame

    def _end_pass(self, phase: Phase) -> None:
        self._open_passes -= 1
        self._apart.discard(threading.get_ident())
        self.gatherer.end_pass(phase)
        if phase in (Phase.EVALUATION, Phase.APART) and not self._open_passes and not self._backwards:
            self._release_idle(keep_near=False)
        self._quiet.notify_all()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Wait until no other thread is inside a forward, and let none begin: weights are about to change."""
        with self._lock:
            self._waiting += 1
            try:
                while self._apart & {thread.ident for thread in threading.enumerate()}:
                    self._quiet.wait(timeout=0.5)  # a thread may end without exiting what it entered
            finally:
                self._waiting -= 1
            try:
                yield
            finally:
                self._quiet.notify_all()

    def touch(self, b: int) -> None:
        """A module reads another module's parameter in bucket ``b``: from now on it needs that bucket."""
        with self._lock:
            frame = self.frames[-1]
            if b not in frame.held:
                if b not in frame.needs:
                    frame.needs.append(b)
                self._hold(frame, b)

    def hold(self, b: int) -> None:
        """Keep bucket ``b`` gathered until ``drop`` (``GatheredParameters`` over all of it)."""
        with self._lock:
            self._uses[b] += 1
            self._require(b, Phase.BY_HAND)

    def drop(self, b: int) -> None:
        with self._lock:
            self._uses[b] -= 1
            if not self._uses[b] and not self.keeps_all:
                self.release(b)

    def keep(self, buckets: Sequence[int]) -> None:
        """Keep these gathered until the weights change, or ``release_all``."""
        with self._lock:
            for b in set(buckets) - self._kept:
                self._uses[b] += 1
                self._kept.add(b)

    def _let_go(self) -> None:
        for b in self._kept:
            self._uses[b] -= 1
        self._kept.clear()

    # Backward -----------------------------------------------------------------------------------------------

    def backward(self, frame: Frame, grad: Tensor | None = None) -> None:
        """Autograd reached an output of this call (Note: use in backward), with this gradient."""
        with self._lock:
            backward = self._running()
            task = backward.task.id
            self._finish(lambda other: other.graph_task == task and other.enter > frame.exit)
            self._activate(frame, task)
            for b in frame.held:
                self._require(b, Phase.BACKWARD)
            if torch.is_grad_enabled():  # inside backward this means that it is recorded (create_graph)
                self._foresee_another(backward, frame.held)
                self.differentiated(grad)

    def _activate(self, frame: Frame, task: int) -> None:
        if frame.graph_task != task:
            frame.graph_task = task
            self.active.append(frame)
            for b in frame.held:
                self._uses[b] += 1

    def _running(self) -> Backward:
        task = torch._C._current_graph_task_id()
        if task not in self._backwards:
            self._forget_failed()
            self._backwards[task] = Backward(lambda: self._close(task))
        return self._backwards[task]

    def _close(self, task: int) -> None:
        with self._lock:
            self._forget(task)
            if not self._backwards and not self._open_passes:
                self._release_idle()

    def _forget(self, task: int) -> None:
        self._backwards.pop(task).over()
        self._finish(lambda frame: frame.graph_task == task)

    def _forget_failed(self) -> None:
        """Backwards that raised did not end (Note: a backward that fails); their frames must not stay in use."""
        failed = [task for task, backward in self._backwards.items() if backward.task.failed]
        for task in failed:
            self._forget(task)

    def _finish(self, done: Callable[[Frame], bool]) -> None:
        if not any(map(done, self.active)):
            return
        for frame in filter(done, self.active):
            for b in frame.held:
                self._uses[b] -= 1
            frame.graph_task = _OUTSIDE
        self.active = [frame for frame in self.active if frame.graph_task != _OUTSIDE]

    # Backward of a backward ---------------------------------------------------------------------------------

    def _foresee_another(self, backward: Backward, needed: Iterable[int]) -> None:
        """The nodes of this backward will be differentiated: watch the gradients of the parameters it uses."""
        for b in needed:
            if b in backward.needed:
                continue
            backward.needed[b] = None
            for param in self.buckets[b].params:
                if param.requires_grad:
                    backward.handles.append(param.register_hook(self.differentiated))

    def watch_input(self, tensor: Tensor) -> None:
        """A gradient with respect to an input of the model may be differentiated again."""
        with self._lock:
            if tensor.requires_grad and tensor not in self._watched:
                self._watched[tensor] = True
                tensor.register_hook(unserializable_hook(lambda grad: self.differentiated(grad)))

    def differentiated(self, grad: Tensor | None) -> None:
        """``grad`` was produced by the running backward: a later one that begins there needs the same buckets."""
        backward = self._backwards.get(torch._C._current_graph_task_id())
        if backward is None or grad is None or not grad.requires_grad:
            return
        frame = Frame([], [], enter=-1, exit=-1)
        needed = backward.needed

        def again(_: Tensor) -> None:
            with self._lock:
                later = self._running()
                if frame.graph_task != later.task.id:
                    frame.held = list(needed)
                    self._activate(frame, later.task.id)
                for b in frame.held:
                    self._require(b, Phase.BACKWARD)
                if torch.is_grad_enabled():
                    self._foresee_another(later, frame.held)

        grad.register_hook(again)

    # Gathering and releasing --------------------------------------------------------------------------------

    def _require(self, b: int, phase: Phase) -> None:
        if phase.trains:
            self.trace.use(b)
        bucket = self.buckets[b]
        if bucket.status is Status.GATHERED:
            return
        if not self.keeps_all:
            self._release_idle(incoming=bucket.layout.padded_numel)
        self.gatherer.gather(b, phase)
        if not phase.trains:
            self._left.add(b)

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
            self.gatherer.released(b)

    def _live(self) -> int:
        """Elements of gathered buckets that could be released."""
        return sum(
            b.layout.padded_numel for b in self.buckets if b.status is Status.GATHERED and not b.persistent
        )

    def end_of_step(self) -> None:
        """The weights have changed; ``publish`` has released what was gathered."""
        self._let_go()
        self._trainer = threading.get_ident()
        self._left.clear()
        self.trace.end_of_step()

    def abandon(self) -> None:
        """An exception ended the batch: this thread's calls and all backwards are over, and the step starts over."""
        with self._lock:
            for task in list(self._backwards):
                self._forget(task)
            if self.frames:
                self._open_passes -= 1
            for frame in self.frames:
                for b in frame.held:
                    self._uses[b] -= 1
            self.frames.clear()
            self.trace.restart()

    def release_all(self) -> None:
        with self._lock:
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
        self.abandon()
        self._uses = [0] * len(self.buckets)
        self._kept.clear()

    reset_step = end_of_step
