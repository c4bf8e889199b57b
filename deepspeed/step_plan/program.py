"""What one rank does in a step, in order: written down while the engine's own code runs on paper.

A program is a list of micro-batches, each a list of events of the thread that trains: it computes a call, starts a
collective, or waits for one. Who gathers what when, how buckets fill, which sums may be in flight and what is waited
for before the next one is therefore decided by the engine's code (``memory_plan/rehearsal.py``), not described again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepspeed.comm.pending import Pending
from deepspeed.memory_plan.ledger import Phase
from deepspeed.memory_plan.planner import Setting, cut_buckets, rehearsal_of
from deepspeed.runtime.zero.scopes import DENSE


@dataclass(frozen=True, slots=True)
class Compute:
    """A call of the model; ``call`` counts those of a forward."""

    phase: Phase
    call: int


@dataclass(frozen=True, slots=True)
class Start:
    """A collective. ``nbytes``: of the whole buffer. ``ranks``: how many take part; ``number``: to wait for it."""

    number: int
    operation: str
    nbytes: float
    ranks: int


@dataclass(frozen=True, slots=True)
class Wait:
    number: int


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's, of so many elements."""

    elements: int


Event = Compute | Start | Wait | Update


@dataclass(frozen=True, slots=True)
class Program:
    """``micro_batches``: the events of each; ``update``: those of the step."""

    micro_batches: Sequence[Sequence[Event]]
    update: Sequence[Event]

    @property
    def events(self) -> list[Event]:
        return [event for part in (*self.micro_batches, self.update) for event in part]


@dataclass(slots=True)
class Notebook:
    """The journal of a rehearsal: what its last step did."""

    parts: list[list[Event]] = field(default_factory=list)
    started: int = 0

    def begin_step(self) -> None:
        self.parts = []

    def begin_micro_batch(self) -> None:
        self.parts.append([])

    def compute(self, phase: Phase, call: int) -> None:
        self.parts[-1].append(Compute(phase, call))

    def collective(self, operation: str, nbytes: float, ranks: int) -> Pending:
        number, self.started = self.started, self.started + 1
        if not self.parts:
            return Pending()
        self.parts[-1].append(Start(number, operation, float(nbytes), ranks))
        return Pending(lambda: self.parts[-1].append(Wait(number)))


def program_of(setting: Setting) -> Program:
    """The events of a steady step of rank 0. Where it has several micro-batches, all before the last are alike."""
    notebook = Notebook()
    buckets = cut_buckets(setting)
    rehearsal_of(setting, buckets, notebook).run()
    first, last = notebook.parts[0], notebook.parts[-1]
    micro_batches = [first] * (setting.micro_batches - 1) + [last]
    trained = [bucket for bucket in buckets if bucket.trained]
    elements = sum(fragment.numel for bucket in trained for fragment in bucket.layout.owned(0))
    update: list[Event] = []
    shards, number = setting.shards_by_scope(), notebook.started
    if setting.ranks > 1:  # the norm, and who used what
        update += [
            Start(number, "all_reduce", 8.0 * (2 + setting.facts.trained), setting.ranks),
            Wait(number),
        ]
        number += 1
    update.append(Update(elements))
    waits: list[Event] = []
    for bucket in buckets:
        layout = bucket.layout
        stays = bucket.persistent if setting.plan.zero.shard_params else layout.num_shards > 1
        if stays and bucket.trained and shards.get(layout.scope, shards[DENSE]) > 1:
            nbytes = float(layout.padded_numel * layout.dtype.itemsize)
            update.append(Start(number, "all_gather", nbytes, layout.num_shards))
            waits.append(Wait(number))
            number += 1
    return Program(micro_batches, [*update, *waits])
