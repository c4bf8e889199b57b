"""Status of every rank, exchanged every two seconds through the store of the default process group.

No collectives, and no work in a step: a thread of each rank writes a JSON line to the store, rank 0's reads them all.
Rank 0 notes by its own clock when a line has changed: a rank whose line stays the same has ended, is stopped or is
unreachable.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from deepspeed.base.logging import logger
from deepspeed.comm.hangs.stragglers import clone, common_key, store_of_default_group

PAUSE_S = 2.0
JOIN_S = 2.0
FAILURES = 3  # consecutive ones, after which the rank stops reporting
MAX_SHOWN = 128
SLOWER = 1.1  # times the median: smaller differences are not reported


class RankStates:
    """Exchanges the status of all ranks; one per engine and rank, created equally often on all ranks.

    Args:
        say: called by the thread; returns this rank's status as plain values.
    """

    def __init__(self, say: Callable[[], dict[str, Any]], now: Callable[[], float] = time.time) -> None:
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._say, self._now = say, now
        self._group = dist.group.WORLD
        self._of_group = store_of_default_group()  # keep it alive: it serves other ranks
        self._key = common_key("live") if self._of_group is not None else ""
        self._store: Any = None
        self._heard: dict[int, tuple[str, dict[str, Any], float]] = {}  # line, its content, when it changed
        self._beat = 0
        self._pid = os.getpid()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._of_group is not None:
            self._thread = threading.Thread(target=self._run, name="deepspeed live ranks", daemon=True)
            self._thread.start()

    def end(self) -> None:
        if self._pid != os.getpid():
            return
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)  # the interpreter must not exit while a thread is inside the store

    def _run(self) -> None:
        failures = 0
        while not self._end.wait(PAUSE_S) and self._group is dist.group.WORLD and failures < FAILURES:
            try:
                self.exchange()
                failures = 0
            except Exception as error:  # the store may be gone with its process
                logger.debug(f"rank states: {error!r}")
                failures += 1

    def exchange(self) -> None:
        """Publish this rank's status, and on rank 0 read the others'."""
        if self._store is None:
            self._store = clone(self._of_group)
        self._beat += 1
        line = json.dumps({**self._say(), "beat": self._beat})
        if self.rank != 0:
            self._store.set(f"{self._key}/{self.rank}", line)
            return
        self._hear(0, line)
        for rank in range(1, self.size):
            key = f"{self._key}/{rank}"
            if rank in self._heard or self._store.check([key]):
                self._hear(rank, self._store.get(key).decode())

    def _hear(self, rank: int, line: str) -> None:
        known = self._heard.get(rank)
        if known is None or known[0] != line:
            self._heard[rank] = (line, json.loads(line), self._now())

    def table(self) -> dict[str, Any]:
        """Return the page's data: ``ranks`` (if there are many, silent and late ones first), and the ``slowest``."""
        if self._of_group is None:
            return {"ranks": [{"rank": self.rank, **self._say(), "seen": round(self._now(), 1)}]}
        heard = dict(self._heard)
        rows = [
            {"rank": rank, **said, "seen": round(seen, 1)} for rank, (_, said, seen) in sorted(heard.items())
        ]
        slowest = slowest_of(rows)
        if len(rows) > MAX_SHOWN:
            rows.sort(key=lambda row: (row["seen"], -(row.get("arrival_ms") or 0.0)))
            rows = rows[:MAX_SHOWN]
        return {"ranks": rows, "slowest": slowest}


def slowest_of(rows: list[dict[str, Any]]) -> int | None:
    """Return the rank that reaches the gradient reduction last, where the others wait for it; None if it is not clearly
    later than the median."""
    known = [(row["arrival_ms"], row["rank"]) for row in rows if row.get("arrival_ms")]
    if len(known) < 2:
        return None
    latest, rank = max(known)
    middle = sorted(ms for ms, _ in known)[(len(known) - 1) // 2]
    return rank if latest > SLOWER * middle else None
