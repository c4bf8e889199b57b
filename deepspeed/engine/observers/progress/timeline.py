"""The section `trace`: a timeline of some steps, in a file per rank.

Methods of the engine's parts are wrapped, and modules hooked, only during these steps; before and after, the engine
is unchanged.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.base.logging import is_rank_zero, logger
from deepspeed.comm.collectives import OPERATIONS, Communicator
from deepspeed.comm.pending import DONE, Pending
from deepspeed.config.sections.profiling import TraceConfig
from deepspeed.engine.observers.folders import make_folder
from deepspeed.observe.timeline.recorder import (
    BACKWARD,
    COLLECTIVE,
    COPY,
    FORWARD,
    GATHER,
    PHASE,
    STEP,
    WAIT,
    MethodPatches,
    OperationProfile,
    TimelineRecorder,
)

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine

OUTSIDE, DATA = "outside the engine", "data and script"


class Timeline:
    """Records from the first forward of the first step to the end of the last one."""

    def __init__(self, engine: Engine, config: TraceConfig) -> None:
        self.engine, self.config = engine, config
        self.folder = make_folder("trace.path", config.path)
        self.recorder: TimelineRecorder | None = None
        self.operations: OperationProfile | None = None
        self.replaced = MethodPatches()
        self._hooks: list[Any] = []
        self._begun: dict[str, int] = {}
        self._last: tuple[str, int] | None = None  # the last phase that ended, and its end time
        self._step_began = 0
        self._differentiated: tuple[str, int] | None = None  # the module in backward, and its begin time
        self._subscriptions: list[tuple[str, Callable[..., None]]] = [
            ("before_forward", self.before_forward),
            ("after_step", self.after_step),
            ("on_destroy", self.end),
        ]
        for event, subscriber in self._subscriptions:
            engine.events.on(event, subscriber)

    # Which steps --------------------------------------------------------------------------------------------

    def before_forward(self, **_: Any) -> None:
        trains = torch.is_grad_enabled() and self.engine.module.training
        if self.recorder is None and trains and self.engine.global_steps + 1 >= self.config.steps[0]:
            self._begin()

    def after_step(self, **_: Any) -> None:
        """End a step. Also begin recording for engines without a forward (pipelines), after the previous step."""
        engine, recorder = self.engine, self.recorder
        if recorder is None:
            is_next = engine.global_steps + 1 == self.config.steps[0]
            if is_next and engine.core is not None and engine.clock.position == 0:
                self._begin()
                self._last = ("step", self._step_began)
            return
        self._leave("step")
        if engine.clock.position == 0:
            now = recorder.now()
            recorder.add(STEP, f"step {engine.global_steps}", self._step_began, now, step=engine.global_steps)
            self._step_began = now
            if engine.global_steps >= self.config.steps[1]:
                self.end()

    def _begin(self) -> None:
        engine = self.engine
        self.operations = OperationProfile() if self.config.operations else None
        recorder = self.recorder = TimelineRecorder()
        self._step_began = recorder.now()
        during: list[tuple[str, Callable[..., None]]] = [
            ("before_forward", functools.partial(self._enter, "forward")),
            ("after_forward", functools.partial(self._leave, "forward")),
            ("before_backward", functools.partial(self._enter, "backward")),
            ("after_backward", functools.partial(self._leave, "backward")),
            ("before_step", functools.partial(self._enter, "step")),
        ]
        for event, subscriber in during:  # the event in progress calls its new subscriber, too
            engine.events.on(event, subscriber)
        self._subscriptions += during
        if not engine.compilation.is_compiled:
            for name, module in engine.module.named_modules():
                if name:
                    self._watch_module(recorder, name, module)
        self._watch_collectives(recorder)
        self._watch_pipeline(recorder)
        self._watch_buckets(recorder)
        self._watch_storage(recorder)

    def end(self, **_: Any) -> None:
        for event, subscriber in self._subscriptions:
            self.engine.events.off(event, subscriber)
        self._subscriptions = []
        self.replaced.undo()
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        if self.recorder is not None:
            self._write(self.recorder)
        self.recorder = None

    def _write(self, recorder: TimelineRecorder) -> None:
        engine = self.engine
        path = self.folder / f"rank{engine.global_rank:05d}.trace.json"
        exported = self.folder / f".operations-{engine.global_rank}-{os.getpid()}.json"
        details = {
            "rank": engine.global_rank,
            "ranks": engine.world_size,
            "steps": self.config.steps,
            "device": engine.device.type,
        }
        try:
            if self.operations is not None:
                self.operations.stop(exported)
            recorder.write(path, details, exported if self.operations is not None else None)
        except OSError as error:
            logger.warning(f"trace.path={self.config.path!r}: cannot write the timeline: {error}")
            return
        finally:
            self.operations = None
            exported.unlink(missing_ok=True)
        if is_rank_zero():
            logger.info(
                f"timeline of steps {self.config.steps} in {self.folder}; 'ds trace {self.folder}' summarizes it"
            )

    # Phases -------------------------------------------------------------------------------------------------

    def _enter(self, phase: str, **_: Any) -> None:
        recorder = self.recorder
        if recorder is None:
            return
        now = recorder.now()
        if self._last is not None:
            name = DATA if self._last[0] == "step" and phase == "forward" else OUTSIDE
            recorder.add(PHASE, name, self._last[1], now)
        self._begun[phase] = now

    def _leave(self, phase: str, **_: Any) -> None:
        recorder = self.recorder
        if recorder is None or phase not in self._begun:
            return
        now = recorder.now()
        if phase == "backward":
            self._end_module(now)
        recorder.add(PHASE, phase, self._begun.pop(phase), now)
        self._last = (phase, now)

    # Modules ------------------------------------------------------------------------------------------------

    def _watch_module(self, recorder: TimelineRecorder, name: str, module: nn.Module) -> None:
        begun: list[int] = []
        leaf = next(module.children(), None) is None
        names = recorder._names

        def enter(*_: Any) -> None:
            begun.append(recorder.now())
            names().append(name)

        def leave(_: nn.Module, __: Any, outputs: Any) -> None:
            if begun:
                recorder.add(FORWARD, name, begun.pop(), recorder.now(), kind=type(module).__name__)
                if names():
                    names().pop()
            if leaf:
                self._watch_backward(recorder, name, outputs)

        self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
        self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def _watch_backward(self, recorder: TimelineRecorder, name: str, outputs: Any) -> None:
        """Record a leaf module's backward: from the gradient of its output until the next module's backward begins."""

        def begins(_: Any) -> None:
            if self.recorder is recorder:
                now = recorder.now()
                self._end_module(now)
                self._differentiated = (name, now)

        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(begins)
                return

    def _end_module(self, now: int) -> None:
        if self._differentiated is not None and self.recorder is not None:
            name, begin = self._differentiated
            self._differentiated = None
            self.recorder.add(BACKWARD, name, begin, now)

    def _subject(self, recorder: TimelineRecorder) -> str:
        """Return the subject of the work in progress: a bucket, a module, or a phase."""
        if name := recorder.subject():
            return name
        if self._differentiated is not None:
            return self._differentiated[0]
        return next(reversed(self._begun), OUTSIDE)

    # Waits ---------------------------------------------------------------------------------------------

    def _watch_collectives(self, recorder: TimelineRecorder) -> None:
        for communicator in self.engine._network.communicators():
            calls: Counter[str] = Counter()
            for operation in OPERATIONS:
                wrap = functools.partial(self._collective, recorder, communicator, operation, calls)
                self.replaced.method(communicator, operation, wrap)

    def _collective(
        self,
        recorder: TimelineRecorder,
        communicator: Communicator,
        operation: str,
        calls: Counter[str],
        call: Callable[..., Pending],
    ) -> Callable[..., Pending]:
        group = ",".join(map(str, communicator.ranks))

        @functools.wraps(call)
        def recorded(*args: Any, **kwargs: Any) -> Pending:
            subject, begin = self._subject(recorder), recorder.now()
            pending = call(*args, **kwargs)
            if communicator.size == 1 or pending is DONE:
                return pending
            calls[operation] += 1
            nbytes = max(each.nbytes for each in args if isinstance(each, Tensor))
            details = {
                "of": subject,
                "group": group,
                "number": calls[operation],
                "bytes": nbytes,
                "operation": operation,
            }
            issued = recorder.now()
            recorder.add(WAIT, f"start {operation}: {subject}", begin, issued, asked=begin, **details)

            def finish() -> None:
                waits = recorder.now()
                pending.wait()
                end = recorder.now()
                recorder.add(WAIT, f"{operation}: {subject}", waits, end, asked=begin, **details)
                recorder.add(COLLECTIVE, f"{operation}: {subject}", begin, end, **details)

            return Pending(finish)

        return recorded

    def _watch_pipeline(self, recorder: TimelineRecorder) -> None:
        """Record waits for other pipeline stages. Checks the class, since an engine also has its module's
        attributes."""
        if not hasattr(type(self.engine), "pipe_channels"):
            return
        for name, channel in self.engine.pipe_channels():  # type: ignore[attr-defined]
            peer = getattr(channel, "peer", None)
            method = "receive" if hasattr(channel, "receive") else "flush"
            if peer is not None:  # not between two chunks of this rank
                span = functools.partial(
                    recorder.span,
                    WAIT,
                    f"{method} {name}, rank {peer}",
                    operation=method,
                    of=name,
                    **{"from": peer},
                )
                self.replaced.method(channel, method, functools.partial(_within, lambda _, span=span: span()))

    def _watch_buckets(self, recorder: TimelineRecorder) -> None:
        core, sharded = self.engine.core, self.engine.sharded
        if core is not None:
            for bucket in core.reducer.buckets:
                name = unit_of([core.access.names[s.param] for s in bucket.layout.slots if s.param >= 0])
                about = functools.partial(recorder.about, f"gradients of {name}")
                for method in ("launch", "collect"):
                    self.replaced.method(
                        bucket, method, functools.partial(_within, lambda _, about=about: about())
                    )
                if bucket.host is not None:
                    self._record_copies(recorder, bucket.host, "copy", "to host")
        if sharded is not None:
            names = [
                unit_of([self.engine.param_names.get(param, "") for param in bucket.params])
                for bucket in sharded.buckets
            ]
            self.replaced.method(sharded.gatherer, "gather", functools.partial(_gathers, recorder, names))

    def _watch_storage(self, recorder: TimelineRecorder) -> None:
        core, sharded = self.engine.core, self.engine.sharded
        tier: Any = core.store.tier if core is not None else None
        files = [getattr(tier, "swap", None), getattr(tier, "weights_swap", None)]
        files.append(sharded.storage.swap if sharded is not None else None)
        for file in {id(file): file for file in files if file is not None}.values():
            self._record_copies(recorder, file, "read", "start reading")
            self._record_copies(recorder, file, "write", "start writing")
            self._record_copies(recorder, file, "finish", "wait for file")
        if tier is not None:
            self._record_copies(recorder, tier, "update", "update", PHASE)

    def _record_copies(
        self, recorder: TimelineRecorder, owner: Any, method: str, name: str, track: str = COPY
    ) -> None:
        """Record every call of ``owner.method`` as a span, with the size of its largest tensor argument."""

        def span(args: tuple[Any, ...]) -> AbstractContextManager[None]:
            nbytes = max((each.nbytes for each in args if isinstance(each, Tensor)), default=0)
            return recorder.span(track, name, bytes=nbytes, of=recorder.subject())

        self.replaced.method(owner, method, functools.partial(_within, span))


def unit_of(names: Iterable[str]) -> str:
    """Return the common module of parameters, such as ``blocks.3``, or the first and last of several, such as
    ``blocks.3 to blocks.5``."""
    every = [name.split(".")[:-1] for name in names if name]
    if not every:
        return "parameters"
    depth = 0
    while all(len(each) > depth for each in every) and len({each[depth] for each in every}) == 1:
        depth += 1
    below = [each[depth : depth + 1] for each in every]
    if depth and not any(part and part[0].isdigit() for part in below):
        return ".".join(every[0][:depth])
    first, last = (".".join(each[: depth + 1]) or "parameters" for each in (every[0], every[-1]))
    return first if first == last else f"{first} to {last}"


def _within(
    enter: Callable[[tuple[Any, ...]], AbstractContextManager[Any]], call: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``call``, run within the context that ``enter`` makes of its positional arguments."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with enter(args):
            return call(*args, **kwargs)

    return wrapped


def _gathers(recorder: TimelineRecorder, names: list[str], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def gather(index: int, *args: Any, **kwargs: Any) -> Any:
        name = f"weights of {names[index]}"
        with recorder.about(name), recorder.span(GATHER, f"gather {names[index]}", of=name):
            return call(index, *args, **kwargs)

    return gather
