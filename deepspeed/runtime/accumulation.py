"""The accumulation clock: which backward is the last before an optimizer step."""

from __future__ import annotations


class AccumulationClock:
    """Counts micro-batches; one owner of the answer to "is this the boundary?".

    Managed: every ``steps``-th micro-batch is a boundary unless the caller forces the answer (Accelerate does,
    before every backward). Unmanaged: each ``step()`` of the engine is a boundary and nothing before it is.
    """

    def __init__(self, steps: int, *, managed: bool = True) -> None:
        self.steps = steps
        self.managed = managed
        self.micro_steps = 0
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
        return (self.micro_steps + 1) % self.steps == 0

    @property
    def position(self) -> int:
        """Micro-batches since the last boundary."""
        return self.micro_steps % self.steps

    def tick(self) -> None:
        self.micro_steps += 1

    def rewind(self) -> None:
        """Back to the beginning of the batch: its micro-batches do not count."""
        if self.managed:
            self.micro_steps -= self.position
