"""A memory plan: the bytes of one rank by phase, place and kind of memory."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


class MemoryPlace(enum.Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class MemoryPhase(enum.Enum):
    """Moments of a run at which memory is counted. The first update creates state and buffers that later ones reuse."""

    BUILD = "building the model"
    INITIALIZE = "inside initialize"
    READY = "after initialize"
    FORWARD = "forward"
    BACKWARD = "backward"
    FIRST_UPDATE = "first update"
    STEP = "step"


STEADY = (MemoryPhase.FORWARD, MemoryPhase.BACKWARD, MemoryPhase.STEP)
TRAINING = (MemoryPhase.FIRST_UPDATE, *STEADY)
FROM_READY = (MemoryPhase.READY, *TRAINING)


class MemoryKind(enum.Enum):
    """Uses of memory. Kinds in ``ESTIMATED`` depend on the model's code and come from formulas; all others are
    exact."""

    PARAMETERS = "parameters"
    BUFFERS = "module buffers"
    GATHERED = "gathered parameters"
    MASTERS = "master weights"
    STATE = "optimizer state"
    GRADIENTS = "gradients"
    BUCKETS = "gradient buckets in flight"
    COMMUNICATION = "communication buffers"
    STAGING = "offload staging"
    UPDATE = "temporaries of the update"
    PINNING = "rounding of pinned memory"
    SWAP = "swap files"
    ARRIVING = "gradients before their bucket"
    ACTIVATIONS = "activations"
    COUNTED_ACTIVATIONS = "activations within the budget (counted)"


ESTIMATED = (MemoryKind.ARRIVING, MemoryKind.ACTIVATIONS)
"""Kinds that depend on the model's code."""

MODEL_STATES = (
    MemoryKind.PARAMETERS, MemoryKind.BUFFERS, MemoryKind.MASTERS, MemoryKind.STATE, MemoryKind.GRADIENTS,
    MemoryKind.SWAP,
)  # fmt: skip
"""Kinds that exist regardless of the model's code."""


@dataclass(slots=True)
class Ledger:
    """Bytes of one rank. Entries accumulate; ``notes`` list assumptions and uncounted memory."""

    entries: Counter[tuple[MemoryPhase, MemoryPlace, MemoryKind]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def add(self, phases: Iterable[MemoryPhase], place: MemoryPlace, kind: MemoryKind, nbytes: int) -> None:
        for phase in phases:
            self.entries[phase, place, kind] += nbytes

    def kinds(self, phase: MemoryPhase, place: MemoryPlace) -> dict[MemoryKind, int]:
        """Return the non-zero entries of one phase and place, in the order of ``MemoryKind``."""
        found = {kind: self.entries[phase, place, kind] for kind in MemoryKind}
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}

    def total(self, phase: MemoryPhase, place: MemoryPlace, *, estimates: bool = True) -> int:
        return sum(
            nbytes for kind, nbytes in self.kinds(phase, place).items() if estimates or kind not in ESTIMATED
        )

    def peak(
        self,
        place: MemoryPlace,
        phases: Iterable[MemoryPhase] = tuple(MemoryPhase),
        *,
        estimates: bool = True,
    ) -> tuple[int, MemoryPhase]:
        """Return the largest total in bytes, and its phase."""
        totals = [(self.total(phase, place, estimates=estimates), phase) for phase in phases]
        return max(totals, key=lambda entry: entry[0])

    def states(self, place: MemoryPlace) -> int:
        """Return the bytes of model states, after initialize or after an update, whichever are more."""
        return max(
            sum(self.entries[phase, place, kind] for kind in MODEL_STATES)
            for phase in (MemoryPhase.READY, MemoryPhase.STEP)
        )
