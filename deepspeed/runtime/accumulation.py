"""The accumulation clock: which backward is the last before an optimizer step."""

from __future__ import annotations


class AccumulationClock:
    """Counts micro-batches; one owner of the answer to "is this the boundary?".

    Managed: the ``steps``-th micro-batch after the last boundary is the next, unless the caller forces the answer
    (Accelerate does, before every backward). ``steps`` may change at any time: what counts is how many there have been
    since that boundary, so a smaller number that is reached already makes the coming one a boundary.

    Unmanaged: each ``step()`` of the engine is a boundary and nothing before it is.
    """

    def __init__(self, steps: int, *, managed: bool = True) -> None:
        self.steps = steps
        self.managed = managed
        self.position = 0
        """Micro-batches since the last boundary."""
        self._micro_steps = 0
        self.stepping = False
        self._forced: bool | None = None

    def force(self, is_boundary: bool) -> None:
        if not self.managed:
            raise AssertionError(
                "set_gradient_accumulation_boundary() needs managed_gradient_accumulation: true; with false, every "
                "engine.step() is a boundary: call it only when an update is due."
            )
        self._forced = bool(is_boundary)

    @property
    def at_boundary(self) -> bool:
        if not self.managed:
            return self.stepping
        if self._forced is not None:
            return self._forced
        return self.position + 1 >= self.steps

    @property
    def micro_steps(self) -> int:
        """Micro-batches in all."""
        return self._micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        """As if ``steps`` had always been what it is; set ``position`` afterwards where it is known better."""
        self._micro_steps = value
        self.position = value % self.steps

    def tick(self) -> None:
        """A micro-batch is over, and so is its update if it was a boundary."""
        self.position = 0 if self.at_boundary else self.position + 1
        self._micro_steps += 1

    def rewind(self) -> None:
        """Back to the beginning of the batch: its micro-batches do not count."""
        if self.managed:
            self._micro_steps -= self.position
            self.position = 0
