"""Exchange messages between threads of all ranks through the process group's store, because a thread must not issue
collectives while training does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from deepspeed.base.logging import logger
from deepspeed.comm.groups import default_timeout
from deepspeed.comm.hangs.stragglers import WAIT_S, clone, common_key, listed, quietly, store_of_default_group
from deepspeed.comm.pending import CommunicationError

MIN_PAUSE_S, MAX_PAUSE_S = 0.0005, 0.25  # between polls: a tenth of the time waited so far
_ANSWER, _GAVE_UP = b"+", b"!"
EXIT_WAIT_S = 10.0  # rank 0 waits for others after an exception ended its own program


class StoreExchange:
    """Exchange through the store. Every rank calls ``begin`` at the same point of its program, then ``combine``
    equally often and ``end``, from any thread. Afterwards its keys are deleted (unless a rank was lost)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._group_store = store_of_default_group()  # keeps the store's server alive as long as this object
        several = self._group_store is not None
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self._store: Any = clone(self._group_store) if several else None
        self._timeout_s = default_timeout().total_seconds()
        self._key = ""
        self._round = 0
        self._answer: str | None = None

    def begin(self) -> None:
        """Begin an exchange; this rank's n-th matches the other ranks' n-th."""
        self._key = common_key(self._name)
        self._round = 0

    def combine(self, own: bytes, join: Callable[[list[bytes]], bytes]) -> bytes:
        """Return ``join`` of all ranks' bytes, in rank order; rank 0 calls it, and it must not fail.

        CommunicationError: a rank did not answer within the job's timeout, or is gone.
        """
        if self._store is None:
            return join([own])
        self._round += 1
        key = f"{self._key}/{self._round}"
        try:
            return self._collect(key, own, join) if self.rank == 0 else self._submit(key, own)
        except CommunicationError:
            raise
        except RuntimeError as error:  # the store is gone, with the rank that held it
            raise CommunicationError(f"{self._name}: no answer from the ranks' store: {error}") from error

    def end(self) -> None:
        """End the exchange. Rank 0, whose process may hold the store, waits until the others have read the last
        answer."""
        answer, self._answer = self._answer, None
        if self._store is not None:
            quietly(lambda: self._leave(f"{self._key}/end", answer))  # the store may be gone with its process

    def _leave(self, key: str, answer: str | None) -> None:
        store = self._store
        if self.rank:
            store.add(key, 1)
            return
        began = time.monotonic()
        while time.monotonic() < began + EXIT_WAIT_S and store.add(key, 0) < self.size - 1:
            time.sleep(_pause(time.monotonic() - began))
        store.delete_key(key)
        if answer is not None:
            store.delete_key(answer)

    def _collect(self, key: str, own: bytes, join: Callable[[list[bytes]], bytes]) -> bytes:
        keys = [f"{key}/{rank}" for rank in range(1, self.size)]
        former, self._answer = self._answer, f"{key}/all"
        try:
            self._wait(keys)
        except CommunicationError as error:
            self._store.set(self._answer, _GAVE_UP + str(error).encode())
            raise
        result = join([own, *map(bytes, self._store.multi_get(keys))])
        self._store.set(self._answer, _ANSWER + result)
        if former is not None:  # every rank that came here has read it
            quietly(lambda: self._store.delete_key(former))
        return result

    def _submit(self, key: str, own: bytes) -> bytes:
        self._store.set(f"{key}/{self.rank}", own)
        self._wait([f"{key}/all"])
        result = bytes(self._store.get(f"{key}/all"))
        quietly(lambda: self._store.delete_key(f"{key}/{self.rank}"))
        if result.startswith(_GAVE_UP):
            raise CommunicationError(result[1:].decode())
        return result[1:]

    def _wait(self, keys: Sequence[str]) -> None:
        """Wait for ``keys``. Rank 0 decides when to give up; the others wait for it while its store answers."""
        began, warned = time.monotonic(), False
        main_ended: float | None = None
        while not self._store.check(list(keys)):
            now = time.monotonic()
            if self.rank == 0 and self._round == 1 and not warned and now > began + WAIT_S:
                warned = True
                logger.warning(
                    f"{self._name}: rank 0 has waited {WAIT_S:g} s for {self._missing(keys)}, which did not "
                    "begin it. Every rank has to begin it, not only rank 0 (each rank writes its part)."
                )
            if main_ended is None and self.rank == 0 and _exiting_on_error():
                main_ended = now
            late = main_ended is not None and now > main_ended + EXIT_WAIT_S
            if late or now > began + self._timeout_s:
                missing = self._missing(keys) if self.rank == 0 else "rank 0"
                raise CommunicationError(f"{self._name}: nothing received from {missing}")
            time.sleep(_pause(now - began))

    def _missing(self, keys: Sequence[str]) -> str:
        return listed([rank for rank, key in enumerate(keys, 1) if not self._store.check([key])])


def _pause(waited: float) -> float:
    return min(max(waited / 10, MIN_PAUSE_S), MAX_PAUSE_S)


def _exiting_on_error() -> bool:
    return hasattr(sys, "last_value") and not threading.main_thread().is_alive()
