"""Measure how long a rank waits for others: collectives timed at their issue and at their wait.

A network whose engine wants a breakdown of its steps makes these communicators; others make plain ones, without
overhead. On a host the duration of the call counts, on a device the time that its stream is blocked, between two
events that are read only at the end of the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from deepspeed.comm.collectives import OPERATIONS, Communicator
from deepspeed.comm.pending import Pending


class WaitTime:
    """Total time that this rank waits. Of nested and concurrent intervals only the first to begin counts, so that no
    time counts twice.

    Args:
        span: Has ``start`` and ``stop``, which record device events; None: the host's clock.
    """

    def __init__(self, span: Any = None) -> None:
        self.span = span
        self.seconds = 0.0
        self._outermost = threading.Lock()

    def around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run and time ``call(*args, **kwargs)``."""
        if not self._outermost.acquire(blocking=False):
            return call(*args, **kwargs)
        span = self.span
        if span is not None:
            span.start()
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            if span is not None:
                span.stop()
            self.seconds += time.perf_counter() - began
            self._outermost.release()

    def take(self) -> float:
        """Return the milliseconds waited on the host's clock since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken * 1e3


class TimedPending(Pending):
    """A collective in flight whose ``wait`` is timed."""

    __slots__ = ("_inner", "_waited", "_waits")

    def __init__(self, inner: Pending, waits: WaitTime) -> None:
        super().__init__()
        self._inner, self._waits, self._waited = inner, waits, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._waited:  # returns at once, or raises the same error again
            return self._inner.wait()
        self._waited = True
        return self._waits.around(self._inner.wait)

    def is_completed(self) -> bool:
        return self._inner.is_completed()


class TimedCommunicator(Communicator):
    """Communicator that times its collectives, for a network with ``waits``."""

    def _timed(self, call: Callable[..., Pending], *args: Any, **kwargs: Any) -> Pending:
        waits = self._network.waits
        if waits is None or self.size == 1:
            return call(*args, **kwargs)
        pending = waits.around(call, *args, **kwargs)
        done = type(pending) is Pending and pending.is_completed()
        return pending if done else TimedPending(pending, waits)


def _timed_method(name: str) -> Callable[..., Pending]:
    def method(self: TimedCommunicator, *args: Any, **kwargs: Any) -> Pending:
        return self._timed(getattr(super(TimedCommunicator, self), name), *args, **kwargs)

    return method


for _name in (*OPERATIONS, "barrier"):
    setattr(TimedCommunicator, _name, _timed_method(_name))
