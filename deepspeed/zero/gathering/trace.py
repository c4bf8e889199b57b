"""The order in which buckets were used in the last step, from which the next use is predicted. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence

NEVER = sys.maxsize


class UseTrace:
    """Records uses of buckets and follows the record of the previous step.

    A changed order is simply followed: the cursor moves to the next place where the used bucket occurs, and the new
    record replaces the old trace at the end of the step.
    """

    def __init__(self, numels: Sequence[int]) -> None:
        self.numels = list(numels)
        self._last: list[int] = []
        self._now: list[int] = []
        self._cursor = 0

    @property
    def total(self) -> int:
        """Elements of all buckets together."""
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

    def distance(self, b: int) -> int:
        """Elements used before bucket ``b`` is used again; NEVER if it is not, or nothing is known."""
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
        """The step starts over; its record so far is discarded."""
        self._now, self._cursor = [], 0

    def forget(self) -> None:
        self._last, self._now, self._cursor = [], [], 0
