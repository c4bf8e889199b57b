"""Journal of a rehearsed step: its events in the order of the training thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed.comm.pending import Pending
from deepspeed.planning.ledger import MemoryPhase


@dataclass(frozen=True, slots=True)
class ComputeCall:
    """Compute of one call of the model; ``call``: its index within a forward."""

    phase: MemoryPhase
    call: int


@dataclass(frozen=True, slots=True)
class CollectiveStart:
    """Start of a collective. ``nbytes``: size of the full buffer. ``ranks``: number of participants, with
    ``stride`` (1: neighbours). ``number``: identifies it in `CollectiveWait`."""

    number: int
    operation: str
    nbytes: float
    ranks: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class CollectiveWait:
    number: int


@dataclass(slots=True)
class EventRecorder:
    """Keeps the events of the last rehearsed step, by micro-batch."""

    parts: list[list[ComputeCall | CollectiveStart | CollectiveWait]] = field(default_factory=list)
    started: int = 0

    def begin_step(self) -> None:
        self.parts = []

    def begin_micro_batch(self) -> None:
        self.parts.append([])

    def compute(self, phase: MemoryPhase, call: int) -> None:
        """Record the forward or backward of a call; the parameters that it needs are gathered."""
        self.parts[-1].append(ComputeCall(phase, call))

    def collective(self, operation: str, nbytes: float, ranks: int, stride: int) -> Pending:
        """Record the start of a collective; waiting on the result records its end. ``nbytes``: size of the full buffer
        that all ranks fill or sum, or that each sends from; ``stride``: between the ranks (1: neighbours)."""
        number, self.started = self.started, self.started + 1
        if not self.parts:
            return Pending()
        self.parts[-1].append(CollectiveStart(number, operation, float(nbytes), ranks, stride))
        return Pending(lambda: self.parts[-1].append(CollectiveWait(number)))
