"""One order in which every rank launches the gathers and sums of a step. Pure.

[Note: one order] A collective needs every rank, so a rank that waits for one must not keep another rank from reaching
it. Gathers and sums on two communicators easily violate this: rank 0 waits for the sum of block 23 before it gathers
block 19; rank 1 gathers block 19 first, because it never got a gradient for block 23; both hang, on the device as on
the host. (NCCL has the same requirement: kernels of two communicators on one device may be launched in any order only
if they always fit on it together.) So gathers and sums share one order, the one of rank 0 in the last step, and every
rank launches all of it:

- a *need* (a bucket is used that is not gathered here) launches all entries up to it. A sum that comes before it
  and is incomplete on this rank starts with zeros for what is missing; gradients that arrive later are summed later, as
  the ranks agree at the step (``StepVote``);
- a sum that completes early waits for its turn, and so does a prefetched gather beyond ``window`` elements;
- the end of a forward pass, of a backward that reduces, and of the step launches whatever is left up to that point.

A rank waits only for entries that it has launched, and before launching entry n waits at most for entries before n:
by induction every entry completes, whatever each rank's control flow. Buckets outside the order (a branch that rank 0
did not take) are fetched from the other ranks' servers, which requires no cooperation from their training loops.

A *segment* is the interval between two backwards that reduce. All ranks have the same number of segments in a step,
since all of them launch the sums; so a step with more micro-batches than the last still begins each segment in sync.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import NamedTuple


class EntryKind(enum.IntEnum):
    NEED = 0  # in a record: the bucket was needed; in an order: gather it
    SUM = 1
    PASS = 2  # the end of a forward pass
    RESHARD = 3  # only in a record: the bucket was resharded


class LaunchEntry(NamedTuple):
    kind: EntryKind
    bucket: int = -1


END_OF_PASS = LaunchEntry(EntryKind.PASS)


class LaunchOrder:
    """The agreed order of the current step, or of an evaluation (``entries``), this rank's position in it, and the
    record of its own uses."""

    def __init__(self, entries: list[LaunchEntry] | None = None) -> None:
        self.agreed: list[list[LaunchEntry]] = [entries] if entries else []
        self.record: list[list[LaunchEntry]] = [[]]
        self.cursor = 0
        self._passes = 0  # ends of forward passes in this segment, on this rank
        self._marks = 0  # ends of forward passes in the order before the cursor

    @property
    def segment(self) -> int:
        return len(self.record) - 1

    @property
    def position(self) -> tuple[int, int]:
        return self.segment, self.cursor

    @property
    def begun(self) -> bool:
        """Return whether anything has happened in this segment."""
        return bool(self.cursor or self.record[-1])

    @property
    def entries(self) -> list[LaunchEntry]:
        return self.agreed[self.segment] if self.segment < len(self.agreed) else []

    def upcoming(self) -> LaunchEntry | None:
        entries = self.entries
        return entries[self.cursor] if self.cursor < len(entries) else None

    def advance(self) -> LaunchEntry:
        """Advance by one entry and return it."""
        entry = self.entries[self.cursor]
        self.cursor += 1
        self._marks += entry.kind is EntryKind.PASS
        return entry

    def find(self, bucket: int, *, beyond_sums: bool) -> int:
        """Return the number of entries from the cursor through the next gather of ``bucket``; 0 if there is none.

        A forward must not look beyond sums, which it would start before there are any gradients.
        """
        for ahead, entry in enumerate(self.entries[self.cursor :], start=1):
            if entry == (EntryKind.NEED, bucket):
                return ahead
            if entry.kind is EntryKind.SUM and not beyond_sums:
                break
        return 0

    def end_pass(self) -> int:
        """End a forward pass; return the number of entries to launch for the other ranks."""
        self.record[-1].append(END_OF_PASS)
        self._passes += 1
        if self._marks >= self._passes:
            return 0
        for ahead, entry in enumerate(self.entries[self.cursor :], start=1):
            if entry.kind is EntryKind.PASS:
                return ahead
            if entry.kind is EntryKind.SUM:
                break
        return 0

    def end_segment(self) -> None:
        self.record.append([])
        self.cursor = self._passes = self._marks = 0

    def restart(self) -> None:
        """Restart the step, after a batch was abandoned, and discard its record so far."""
        self.record = [[]]
        self.cursor = self._passes = self._marks = 0

    def end_step(self, agreed: list[list[LaunchEntry]]) -> None:
        self.agreed = agreed
        self.restart()


def with_prefetch(record: Sequence[LaunchEntry], numels: Sequence[int], window: int) -> list[LaunchEntry]:
    """Return the launch order of a record, with each gather as early as a window of ``window`` elements ahead of its
    use allows, but never before the reshard of its own bucket, which is whole until then."""
    order: list[LaunchEntry] = []
    needs = [i for i, entry in enumerate(record) if entry.kind is EntryKind.NEED]
    resharded = [i for i, entry in enumerate(record) if entry.kind is EntryKind.RESHARD]
    launched = 0  # needs launched so far
    ahead = 0
    done = 0
    for i, entry in enumerate(record):
        if entry.kind is EntryKind.NEED:
            if done == launched:
                order.append(entry)
                launched += 1
            else:
                ahead -= numels[entry.bucket]
            done += 1
        elif entry.kind is not EntryKind.RESHARD:
            order.append(entry)
            continue
        while done and launched < len(needs):
            upcoming = needs[launched]
            bucket = record[upcoming].bucket
            whole = any(i < r < upcoming and record[r].bucket == bucket for r in resharded)
            if whole or ahead + numels[bucket] > window:
                break
            order.append(record[upcoming])
            ahead += numels[bucket]
            launched += 1
    return order


def encode(segments: Sequence[Sequence[LaunchEntry]]) -> list[int]:
    """Encode as a message: the bytes of JSON, with a pair of kind and bucket per entry."""
    return list(json.dumps(segments).encode())


def decode(message: Sequence[int]) -> list[list[LaunchEntry]]:
    segments = json.loads(bytes(message))
    return [[LaunchEntry(EntryKind(kind), bucket) for kind, bucket in entries] for entries in segments]
