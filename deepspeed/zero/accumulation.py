"""The accumulation clock, which tells which backward is the last before an optimizer step."""

from __future__ import annotations


class AccumulationClock:
    """Counter of micro-batches; the only place that decides whether this one is the accumulation boundary.

    Managed: the ``steps``-th micro-batch after the last boundary is the next boundary, unless the caller forces the
    answer (Accelerate does, before every backward). ``steps`` may change at any time: if the micro-batches since the
    last boundary already reach a smaller value, the next one is a boundary.

    Unmanaged: each ``step()`` of the engine is a boundary and nothing else is.
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
    def forced(self) -> bool:
        """Return whether the caller decides which micro-batch is a boundary."""
        return self._forced is not None

    @property
    def at_boundary(self) -> bool:
        if not self.managed:
            return self.stepping
        if self._forced is not None:
            return self._forced
        return self.position + 1 >= self.steps

    @property
    def mid_update(self) -> bool:
        """Return whether micro-batches await their update: some were counted since the last boundary, or the caller
        has forced the answer to no. ``zero_grad`` keeps gradients meanwhile."""
        return self.position > 0 or self._forced is False

    @property
    def micro_steps(self) -> int:
        """Total number of micro-batches."""
        return self._micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        """Set the total as if ``steps`` had always had its current value; set ``position`` afterwards if it is known
        exactly."""
        self._micro_steps = value
        self.position = value % self.steps

    def tick(self) -> None:
        """Count a micro-batch, after its update if it was a boundary."""
        self.position = 0 if self.at_boundary else self.position + 1
        self._micro_steps += 1

    def rewind(self) -> None:
        """Return to the beginning of the batch and uncount its micro-batches."""
        if self.managed:
            self._micro_steps -= self.position
            self.position = 0
