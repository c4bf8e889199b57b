"""Listeners that are told what a rehearsed step does, in the order of the thread that trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from deepspeed.comm.pending import DONE, Pending
from deepspeed.planning.ledger import MemoryPhase


class Journal(Protocol):
    def begin_step(self) -> None:
        """Another one of the rehearsal's steps begins."""

    def begin_micro_batch(self) -> None: ...

    def compute(self, phase: MemoryPhase, call: int) -> None:
        """The forward or backward of a call runs now; what it needs is there."""

    def collective(self, operation: str, nbytes: float, ranks: int, apart: int = 1) -> Pending:
        """One is started. ``nbytes``: of the whole buffer that all ranks fill or sum, or that each sends from;
        ``apart``: 1, where the ranks are neighbours; else how far each is from the next."""
        ...


class _Silent:
    """Nobody is told."""

    def begin_step(self) -> None: ...

    def begin_micro_batch(self) -> None: ...

    def compute(self, phase: MemoryPhase, call: int) -> None: ...

    def collective(self, operation: str, nbytes: float, ranks: int, apart: int = 1) -> Pending:
        return DONE


SILENT = _Silent()


@dataclass(frozen=True, slots=True)
class Compute:
    """A call of the model; ``call`` counts those of a forward."""

    phase: MemoryPhase
    call: int


@dataclass(frozen=True, slots=True)
class Start:
    """A collective. ``nbytes``: of the whole buffer. ``ranks``: how many take part, each ``apart`` from the next (1:
    neighbours); ``number``: to wait for it."""

    number: int
    operation: str
    nbytes: float
    ranks: int
    apart: int = 1


@dataclass(frozen=True, slots=True)
class JournalWait:
    number: int


@dataclass(slots=True)
class Notebook:
    """Keeps what the last step did, by micro-batch."""

    parts: list[list[Compute | Start | JournalWait]] = field(default_factory=list)
    started: int = 0

    def begin_step(self) -> None:
        self.parts = []

    def begin_micro_batch(self) -> None:
        self.parts.append([])

    def compute(self, phase: MemoryPhase, call: int) -> None:
        self.parts[-1].append(Compute(phase, call))

    def collective(self, operation: str, nbytes: float, ranks: int, apart: int = 1) -> Pending:
        number, self.started = self.started, self.started + 1
        if not self.parts:
            return Pending()
        self.parts[-1].append(Start(number, operation, float(nbytes), ranks, apart))
        return Pending(lambda: self.parts[-1].append(JournalWait(number)))
