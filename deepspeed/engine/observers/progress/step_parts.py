"""Times of the parts of each step, without waiting for a device: marks at the engine's events.

On a device the marks are events of its stream, which are read a step later, when the device has passed them. So a step
has the parts of the one before it there; a mean over a second does not notice.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.base.accelerator import get_accelerator
from deepspeed.observe.live.record import SPANS

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine

ENDS: dict[str, tuple[tuple[str, str], ...]] = {
    "after_forward": (("before_forward", "forward"),),
    "before_reduction": (("before_backward", "inner"),),
    "after_backward": (("before_backward", "backward"), ("before_reduction", "reduction")),
    "after_step": (("before_step", "update"),),
}
"""An event at which parts end: where each began, and its name."""

BEGINS = ("before_forward", "before_backward", "before_reduction", "before_step")
MAX_UNREAD = 1024  # marks of a device; many micro-batches: the first ones have been passed long ago


class StepParts:
    """Sums of forward, backward, its inner part and exposed reduction, and update, over the micro-batches of a step."""

    def __init__(self, engine: Engine) -> None:
        self._on_host = get_accelerator().use_host_timers()
        self._at: dict[str, Any] = {}
        self._ms = dict.fromkeys(SPANS, 0.0)
        self._unread: list[tuple[str, Any, Any]] = []
        self._before: list[tuple[str, Any, Any]] = []
        for event in {*ENDS, *BEGINS}:
            engine.events.on(event, partial(self._reach, event))

    def _reach(self, event: str, **_: Any) -> None:
        if event == "before_forward" and not torch.is_grad_enabled():  # an evaluation: no part of a step
            return
        at, now = self._at, time.perf_counter() if self._on_host else _mark()
        for began, part in ENDS.get(event, ()):
            since = at.get(began)
            if since is None:
                continue
            if self._on_host:
                self._ms[part] += 1e3 * (now - since)
            else:
                self._unread.append((part, since, now))
        if event in BEGINS:
            at[event] = now
        else:
            at.clear()
        if len(self._unread) > MAX_UNREAD:
            self._read(self._unread[: MAX_UNREAD // 2])
            del self._unread[: MAX_UNREAD // 2]

    def _read(self, marks: list[tuple[str, Any, Any]]) -> None:
        """Add them up. Those that the device has not passed are dropped: waiting would cost more."""
        for part, began, ended in marks:
            if ended.query():
                self._ms[part] += began.elapsed_time(ended)

    def take(self) -> tuple[float, ...]:
        """Milliseconds in the order of ``SPANS``, at the end of a step."""
        self._read(self._before)
        self._before, self._unread = self._unread, []
        spans = tuple(self._ms.values())
        self._ms = dict.fromkeys(SPANS, 0.0)
        return spans


def _mark() -> Any:
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event
