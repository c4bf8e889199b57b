"""Determine which buckets a model needs, when, and in which phase; ``Transitions`` has them gathered and resharded.

[Note: use in forward] A call of a hooked module is a *frame*, which holds the buckets it needs while it is open. A
frame belongs to the pass of the enclosing frame, unless a backward has begun in between.

[Note: use in backward] Autograd runs nodes in the reverse order of their creation. Every call records the clock at
its entry and exit. When autograd reaches a hook on its outputs, its buckets become active again, and every active
call that *entered after this one's exit* is done: its nodes were all created later. Calls of one graph task end with
it, so recomputation (which runs forward hooks, and nested graph tasks in the reentrant variant) cannot leak.

[Note: backward of a backward] With ``create_graph`` the nodes of a backward are differentiated in turn, and they too
have saved weights. A gradient reaches them only through the results of that backward: gradients of parameters, of the
model's inputs, or of its modules' outputs. Each of those gets a hook that keeps the buckets of that backward gathered
until the second backward ends.

[Note: threads] Each thread has its own frames; a bucket in use on any thread stays gathered. Only one thread issues
collectives (the one that runs the steps, with autograd's threads working for it), because threads interleave
differently on each rank. A forward on another thread fetches one-sidedly instead.

[Note: what is recorded] The grad mode only tells whether autograd records, so that a backward of this call, or of
this backward, is possible at all. The phase is never derived from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket
from deepspeed.zero.gathering.transitions import Gatherer, LiveBudget, Transitions
from deepspeed.zero.gradients.backward import GraphTask

recording: Callable[[], bool] = torch.is_grad_enabled
"""Return whether autograd is recording (Note: what is recorded)."""

_OUTSIDE = -1  # not in any graph task
_BEFORE_ALL = -2  # on the coordinator's clock

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


@dataclass(slots=True)
class Frame:
    """One call of one hooked module: the buckets it holds, by index, and when it began and ended on the coordinator's
    clock.

    ``needs`` is the module's list, shared with its later calls; ``entered_in`` is the graph task around the call,
    ``graph_task`` the one that is running its nodes.
    """

    needs: list[int]
    held: list[int]
    enter: int
    phase: Phase = Phase.FORWARD
    entered_in: int = _OUTSIDE
    exit: int = -1  # still open
    graph_task: int = _OUTSIDE


class Backward:
    """A running graph task, with the buckets it needed if its nodes may be differentiated again."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        self.task = GraphTask(at_end)
        self.needed: dict[int, None] = {}  # an ordered set
        self.handles: list[Any] = []

    def over(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        """The open calls, outermost first."""
        self.announced_phase: Phase | None = None
        """Phase of ``engine.forward``, which is about to run; None for modules that are called directly."""


class ParamCoordinator:
    """Turns calls of hooked modules, and backwards through them, into uses of ``buckets`` (trainable and frozen),
    which ``gatherer`` moves within ``budget``."""

    def __init__(self, buckets: Sequence[ShardedBucket], gatherer: Gatherer, budget: LiveBudget) -> None:
        self.buckets = list(buckets)
        self.gatherer = gatherer
        self.transitions = Transitions(buckets, gatherer, budget)
        self.fits_budget = self.transitions.fits_budget
        self.active: list[Frame] = []
        self.this_thread = _ThisThread()
        self.trains_in_eval_mode = False
        """Whether a backward went through a pass that eval mode had announced as an evaluation."""
        self._lock = self.transitions.lock
        self._step_thread = threading.get_ident()
        self._clock = 0
        self._backwards: dict[int, Backward] = {}
        self._watched = WeakIdKeyDictionary()  # input tensors that have a hook

    # Forward ------------------------------------------------------------------------------------------------

    def begin_forward(self, *, training: bool) -> None:
        """Announce the engine's next forward on this thread: training or evaluation; ``training``: the mode of its
        module."""
        if training:
            self.trains_in_eval_mode = False
        trains = recording() and (training or self.trains_in_eval_mode)
        self.this_thread.announced_phase = Phase.FORWARD if trains else Phase.EVALUATION

    def end_forward(self) -> None:
        """Note that the following module calls are direct, not through the engine."""
        self.this_thread.announced_phase = None

    def enter(self, needs: list[int], phase: Phase = Phase.FORWARD, root: Hashable = None) -> None:
        """Begin a call that ``needs`` these buckets. ``phase`` and ``root`` (the module under which the order of an
        evaluation is recorded) apply to outermost calls outside of a backward."""
        frames = self.this_thread.frames
        with self._lock:
            task = _graph_task()
            if frames and frames[-1].entered_in == task:
                phase = frames[-1].phase
            elif task != _OUTSIDE:
                inside = frames[-1].phase if frames else Phase.FORWARD  # a backward begun inside that call
                phase = Phase.RECOMPUTATION if inside.trains else inside
            elif self._step_thread != threading.get_ident():
                phase = Phase.OTHER_THREAD
            self._clock += 1
            frame = Frame(needs, list(needs), self._clock, phase, task)
            frames.append(frame)
            if len(frames) == 1:
                if phase is not Phase.RECOMPUTATION:
                    self._forget_failed()
                self.transitions.begin_pass(phase, root)
            if needs:
                self.transitions.take(needs, phase)

    def leave(self) -> Frame:
        """End the innermost open call of this thread. Return its frame, to which hooks on its outputs refer."""
        with self._lock:
            self._clock += 1
            frames = self.this_thread.frames
            frame = frames.pop()
            frame.exit = self._clock
            if frame.held:
                self.transitions.release(frame.held)
            if not frames:
                self.transitions.end_pass(frame.phase)
            return frame

    def use_outside_bucket(self, b: int) -> None:
        """Hold bucket ``b`` too, because the open call reads one of its parameters, which another module owns. It
        joins the module's list, so that its later calls gather it with the rest."""
        with self._lock:
            frame = self.this_thread.frames[-1]
            if b not in frame.needs:
                frame.needs.append(b)
            frame.held.append(b)
            self.transitions.take((b,), frame.phase)

    # Backward -----------------------------------------------------------------------------------------------

    def backward(self, frame: Frame, grad: Tensor | None = None) -> None:
        """Gather the buckets of this call, because autograd reached one of its outputs with ``grad`` (Note: use in
        backward)."""
        with self._lock:
            backward = self._running()
            task = backward.task.id
            self._release_calls(task, frame.exit)
            phase = Phase.BACKWARD
            if frame.phase is Phase.EVALUATION:
                if self.transitions.evaluating:
                    phase = Phase.EVALUATION  # a backward inside an evaluation, such as forces = -dE/dx
                else:
                    self.trains_in_eval_mode = True
            self._activate(frame, task, phase)
            if recording():  # this backward itself (create_graph)
                self._watch_for_second_backward(backward, frame.held)
                self.on_differentiable_grad(grad)

    def _activate(self, frame: Frame, task: int, phase: Phase) -> None:
        if frame.graph_task == task:
            self.transitions.need(frame.held, phase)  # this task is a holder already
            return
        frame.graph_task = task
        self.active.append(frame)
        self.transitions.take(frame.held, phase)

    def _running(self) -> Backward:
        task = _graph_task()
        if task not in self._backwards:
            self._forget_failed()
            self._backwards[task] = Backward(lambda: self._close(task))
            self.transitions.begin_backward()
        return self._backwards[task]

    def _close(self, task: int) -> None:
        with self._lock:
            self._forget(task, failed=False)

    def _forget(self, task: int, *, failed: bool) -> None:
        self._backwards.pop(task).over()
        self._release_calls(task)
        self.transitions.end_backward(failed=failed)

    def _forget_failed(self) -> None:
        """End the backwards that raised, which did not end themselves (Note: a backward that fails, in
        `zero/gradients/backward.py`), and release their frames."""
        if not self._backwards:
            return
        failed = [task for task, backward in self._backwards.items() if backward.task.failed]
        for task in failed:
            self._forget(task, failed=True)

    def _release_calls(self, task: int, after: int = _BEFORE_ALL) -> None:
        """Release the calls of this task that were entered after time ``after`` on the clock: they are done."""
        done = [frame for frame in self.active if frame.graph_task == task and frame.enter > after]
        if not done:
            return
        for frame in done:
            self.transitions.release(frame.held)
            frame.graph_task = _OUTSIDE
        self.active = [frame for frame in self.active if frame.graph_task != _OUTSIDE]

    # Backward of a backward ---------------------------------------------------------------------------------

    def _watch_for_second_backward(self, backward: Backward, needed: Iterable[int]) -> None:
        """Watch the gradients of the parameters that this backward uses: its nodes will be differentiated."""
        for b in needed:
            if b in backward.needed:
                continue
            backward.needed[b] = None
            for param in self.buckets[b].params:
                if param.requires_grad:
                    backward.handles.append(param.register_hook(self.on_differentiable_grad))

    def watch_input(self, tensor: Tensor) -> None:
        """Watch an input that requires a gradient, since that gradient may be differentiated again."""
        with self._lock:
            if tensor not in self._watched:
                self._watched[tensor] = True
                tensor.register_hook(unserializable_hook(lambda grad: self.on_differentiable_grad(grad)))

    def on_differentiable_grad(self, grad: Tensor | None) -> None:
        """Make a later backward that begins at ``grad``, a result of the running one, hold the same buckets."""
        backward = self._backwards.get(_graph_task())
        if backward is None or grad is None or not grad.requires_grad:
            return
        frame = Frame([], [], enter=-1, exit=-1)
        needed = backward.needed

        def on_second_backward(_: Tensor) -> None:
            with self._lock:
                later = self._running()
                if frame.graph_task != later.task.id:
                    frame.held = list(needed)
                self._activate(frame, later.task.id, Phase.BACKWARD)
                if recording():
                    self._watch_for_second_backward(later, frame.held)

        grad.register_hook(on_second_backward)

    # The step -----------------------------------------------------------------------------------------------

    def end_of_step(self) -> None:
        """Note that the weights have changed, and that this thread runs the steps."""
        self._step_thread = threading.get_ident()
        self.transitions.end_of_step()

    def abandon(self) -> None:
        """End this thread's calls and all backwards, after an exception ended the batch; the step starts over."""
        frames = self.this_thread.frames
        with self._lock:
            for task in list(self._backwards):
                self._forget(task, failed=True)
            if frames:
                self.transitions.cancel_pass(frames[0].phase)
            for frame in frames:
                self.transitions.release(frame.held)
            frames.clear()
            self.transitions.trace.restart()

    # Documented names that clients call ---------------------------------------------------------------------

    def is_invalid_trace(self) -> bool:
        return False

    def is_complete_trace(self) -> bool:
        return self.transitions.trace.complete

    def _invalidate_trace(self) -> None:
        """Forget the recorded order (a forward ran without hooks, or modules changed)."""
        self.transitions.trace.forget()
        self.abandon()
        self.transitions.release_kept()

    reset_step = end_of_step
