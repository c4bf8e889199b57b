"""A barrier for ranks that leave, where so many ranks serve shards that telling each other directly would take too
many connections.

With N ranks that is N - 1 connections and threads on each of them, all at the end. Here each rank adds one to a number
in the process group's store and waits for a key that the last one sets.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

DIRECT_RANKS = 64
"""Up to so many tell each other directly, which also notices a rank that is gone without having left."""

ASK_S = 1.0  # at a time: two threads may wait, and the store serves one at once


class TerminationBarrier:
    """One for all ``size`` ranks that share ``name``."""

    def __init__(self, store: Any, name: str, size: int) -> None:
        self._store = store
        self._size = size
        self._count, self._all = f"deepspeed/leaving/{name}/count", f"deepspeed/leaving/{name}/all"

    def arrive(self) -> None:
        """This rank will send no more requests."""
        with contextlib.suppress(RuntimeError):  # the store is gone: ``wait`` will notice
            if self._store.add(self._count, 1) == self._size:
                self._store.set(self._all, "left")

    def wait(self, limit_s: float, served: Callable[[], int]) -> bool:
        """Wait until all ranks have arrived, or none of them has sent a request for ``limit_s``, as ``served()`` counts
        them. False if the store cannot tell."""
        before, quiet_since = served(), time.monotonic()
        while time.monotonic() - quiet_since < limit_s:
            try:
                self._store.wait([self._all], timedelta(seconds=min(ASK_S, limit_s)))
                return True
            except dist.DistStoreError:  # not yet
                if served() != before:
                    before, quiet_since = served(), time.monotonic()
            except RuntimeError:
                return False
        return True


def make_barrier(name: str, size: int) -> TerminationBarrier | None:
    """None if there are few ranks, or there is no store."""
    if size <= DIRECT_RANKS:
        return None
    with contextlib.suppress(Exception):  # a group created without one
        store: Any = dist.distributed_c10d._get_default_store()
        return TerminationBarrier(store.clone() if hasattr(store, "clone") else store, name, size)
    return None
