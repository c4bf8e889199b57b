"""Handles of collectives in flight, and the error of a failed one."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

from deepspeed.base.constants import RANK_ENDED
from deepspeed.base.exceptions import ExplainedError

_PEER_FAILURE = re.compile(
    r"timed? ?out|Connection (closed|reset|refused)|Broken pipe|peer|abort", re.IGNORECASE
)

_SOURCE_LINE = re.compile(r"\[[^\]]*\.cc:\d+\]\s*")  # source location that gloo puts into its messages


class _Explanation:
    """Text of the last hang report, as long as the hang lasts (hangs/watch.py)."""

    text = ""


explanation = _Explanation()


class CommunicationError(ExplainedError, RuntimeError):
    """A failed collective: names the operation, the ranks of the group and, if known, the silent rank; a hang report
    is appended."""

    @classmethod
    def of(
        cls, operation: str, ranks: Sequence[int], error: Exception, *, silent: int | None = None
    ) -> CommunicationError:
        """Make the error of `operation` among these global ranks; `silent` is the rank that was waited for."""
        reason = _SOURCE_LINE.sub("", str(error))
        waiting = "" if silent is None else f" while waiting for rank {silent}"
        return cls(
            f"{operation} among ranks {list(ranks)} failed{waiting}: {reason}. {RANK_ENDED} (its own log "
            "has the error) or it did not reach this collective in time; if it is just slow, raise the "
            "timeout: DEEPSPEED_TIMEOUT=<minutes>, or init_distributed(timeout=...)."
            + (f"\n{explanation.text}" if explanation.text else "")
        )


def is_peer_failure(error: Exception) -> bool:
    """Return whether a torch.distributed error means that another rank exited or did not answer."""
    return isinstance(error, RuntimeError) and _PEER_FAILURE.search(str(error)) is not None


class Pending:
    """A collective in flight. After `wait()` the output may be read and the input overwritten. `wait()` may be called
    any number of times, and after a failure raises the same error each time."""

    __slots__ = ("_error", "_finish")

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Finish the collective. `timeout` exists for callers that expect a torch `Work`; the group's timeout
        applies."""
        if self._finish is not None:
            self._run()
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        finish, self._finish = self._finish, None
        try:
            if finish is not None:
                finish()
        except Exception as error:  # raised by `wait()`, which may come later (OrderedPending)
            self._error = error
        except BaseException:  # Ctrl-C
            self._error = CommunicationError("this collective was interrupted; its output is not complete")
            raise

    def is_completed(self) -> bool:
        """Return whether `wait()` would return at once. Never blocks; may return False for finished traffic."""
        return self._finish is None


DONE = Pending()  # what a collective without any traffic returns


class OrderedPending(Pending):
    """Pending collective whose `finish` also moves data that other ranks wait for.

    If two of these were finished in different orders on two ranks, each could wait for data that the other sends only
    later. So they are finished in the order of issue, whichever is waited for first: `wait()` finishes the older ones
    before its own.
    """

    __slots__ = ()

    _queue: deque[OrderedPending] = deque()  # process-wide: the order applies across groups
    _lock = threading.RLock()

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__(finish)
        with self._lock:
            self._queue.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._finish is not None:
            with self._lock:
                while self._finish is not None:
                    self._queue.popleft()._run()
        if self._error is not None:
            raise self._error
        return True

    @classmethod
    def forget_all(cls) -> None:
        """Drop operations that were never waited for, before the process groups are destroyed."""
        with cls._lock:
            while cls._queue:
                dropped = cls._queue.popleft()
                dropped._finish = None
                dropped._error = CommunicationError(
                    "this collective was still pending when its process group was destroyed"
                )
