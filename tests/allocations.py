"""Counting the tensor memory that a block of code allocates on the host, not what the process happens to occupy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.autograd.profiler import profile


class Allocations:
    """``peak`` and ``kept``: bytes above the state at the beginning, at most and at the end of the block.

    Every allocation of this thread through torch's host allocator counts, also those inside operators. Memory from
    before that is freed inside is not subtracted, so the numbers are upper bounds. Mapping a file is no allocation:
    what is as large as a file in ``mapped`` is left out.
    """

    peak = 0
    kept = 0


@contextmanager
def counted(mapped: Path | None = None) -> Iterator[Allocations]:
    found = Allocations()
    with profile(profile_memory=True) as run:
        yield found
    files = (
        {path.stat().st_size for path in mapped.rglob("*") if path.is_file()} if mapped is not None else set()
    )
    events = [e for e in run.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted((e for e in events if abs(e.nbytes()) not in files), key=lambda e: e.start_ns()):
        found.kept += event.nbytes()
        found.peak = max(found.peak, found.kept)
