"""Memory of an engine: the storages that it owns, and every byte that torch's CPU allocator returns."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from deepspeed.zero.bucket import BufferPool
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket
from deepspeed.zero.gradients.bucket import GradBucket
from deepspeed.zero.offload.tiers import OffloadedTier, StagingSlot


def owned_bytes(engine: Any) -> int:
    """Host memory of the model states and buffers of ``engine``, each storage once; files do not count."""
    core = engine.core
    files = [swap for swap in (_state_file(core), _param_file(engine)) if swap is not None]
    tensors = [t for t in _tensors(engine) if not any(swap.holds(t) for swap in files)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _tensors(engine: Any) -> list[Tensor]:
    core = engine.core
    found: list[Tensor | None] = list(engine.module.buffers())
    if engine.sharded is None:
        found += [p.data for p in engine.module.parameters()]
    else:
        for bucket in engine.sharded.buckets:
            found += [bucket.shard, bucket.full]
    for bucket in core.reducer.buckets:
        found += [bucket._owned, bucket._shard, bucket.reduced, bucket.local]
        if bucket.in_flight is not None:
            found += [bucket.in_flight.wire, bucket.in_flight.out]
    if core.reducer.buckets:
        found += [t for free in core.reducer.buckets[0].pool._free.values() for t in free]
    for owned in core.store.fragments:
        found += [owned.master, *(v for v in core.store.state_of(owned).values() if isinstance(v, Tensor))]
    if isinstance(core.store.tier, OffloadedTier):
        found += [slot.buffer for slot in core.store.tier.slots]
    return [t for t in found if t is not None]


def _state_file(core: Any) -> Any:
    return getattr(core.store.tier, "swap", None)


def _param_file(engine: Any) -> Any:
    return engine.sharded.storage.swap if engine.sharded is not None else None


def file_bytes(engine: Any) -> int:
    """Disk that the swap files of ``engine`` take."""
    return sum(f._grown for f in (_state_file(engine.core), _param_file(engine)) if f is not None)


@contextlib.contextmanager
def watched(engine: Any) -> Iterator[list[int]]:
    """The peak of ``owned_bytes``: looked at whenever a part of the engine has taken memory."""
    peak = [owned_bytes(engine)]

    def look() -> None:
        peak[0] = max(peak[0], owned_bytes(engine))

    def after(cls: type, name: str) -> Any:
        method: Callable[..., Any] = getattr(cls, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            look()
            return result

        return mock.patch.object(cls, name, wrapped)

    places = (
        (GradBucket, "_open"),
        (GradBucket, "_kept_shard"),
        (ShardedBucket, "allocate"),
        (StagingSlot, "reserve"),
    )
    with contextlib.ExitStack() as stack:
        for cls, name in (*places, (BufferPool, "give")):
            stack.enter_context(after(cls, name))
        yield peak
        look()


# Operators that hand their work to a library of matrix products, which may pack or convert what it multiplies. How much
# it takes for that depends on the kind of CPU and the number of threads.
PRODUCTS = re.compile(r"aten::(addmm|mm|baddbmm|bmm|addmv|mv|(mkldnn|onednn)_\w+|\w*convolution\w*)$")


@dataclass(frozen=True)
class Change:
    """An allocation (``size`` above zero) or a release of torch's CPU allocator, with its thread."""

    ts: float
    thread: Any
    address: int
    size: int


def without_scratch(changes: Sequence[Change], events: Sequence[dict[str, Any]]) -> list[Change]:
    """``changes`` in the order of time, without memory that one matrix product took and gave back before it ended.

    What a product returns outlives it and stays, and so does everything that other operators take: scratch of a matrix
    library is the only thing that is left out.
    """
    products: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and PRODUCTS.match(event["name"]):
            products[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))

    def product_of(change: Change) -> tuple[float, float] | None:
        return next((p for p in products[change.thread] if p[0] <= change.ts <= p[1]), None)

    taken: dict[int, Change] = {}
    scratch: set[Change] = set()
    ordered = sorted(changes, key=lambda change: change.ts)
    for change in ordered:
        if change.size > 0:
            taken[change.address] = change
            continue
        begin = taken.pop(change.address, None)
        if begin is not None and (inside := product_of(begin)) is not None and inside == product_of(change):
            scratch |= {begin, change}
    return [change for change in ordered if change not in scratch]


class Allocations:
    """Bytes that torch's CPU allocator has handed out since the beginning, by the profiler's own events.

    Scratch of matrix products is left out (``without_scratch``).
    """

    def __enter__(self) -> Allocations:
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        self._profile.__enter__()
        return self

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            yield

    def __exit__(self, *exc: Any) -> None:
        self._profile.__exit__(*exc)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            self._events = json.loads(path.read_text())["traceEvents"]
        changes = [
            Change(e["ts"], e["tid"], e["args"]["Addr"], e["args"]["Bytes"])
            for e in self._events
            if e.get("name") == "[memory]"
        ]
        kept = without_scratch(changes, self._events)
        sums = itertools.accumulate(change.size for change in kept)
        self._sums = [(change.ts, total) for change, total in zip(kept, sums, strict=True)]

    def peak(self, span: str) -> int:
        """The largest sum inside the spans of that name."""
        inside = [(e["ts"], e["ts"] + e["dur"]) for e in self._events if e.get("name") == span]
        at_entry = [total for ts, total in self._sums if ts < inside[0][0]][-1:]
        return max(
            at_entry + [total for ts, total in self._sums if any(low <= ts <= high for low, high in inside)]
        )
