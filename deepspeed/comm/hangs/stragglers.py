"""Name the ranks that have not reached a common point after ten seconds, long before a timeout.

An arriving rank records this in the process group's store, which a rank that has waited for a while reads. So nothing
else is sent if all ranks arrive, and the message names the missing ranks instead of a broken connection.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed.base.logging import logger
from deepspeed.base.tables import first_of
from deepspeed.comm.pending import CommunicationError, is_peer_failure

POST_S = 1.0  # waited at start-up before a rank announces its arrival
JOIN_S = 2.0
WAIT_S = 10.0  # waited before the missing ranks are named

_visits: tuple[Any, Counter[str]] = (None, Counter())
"""The default group, and the number of visits of each point."""


@contextlib.contextmanager
def awaiting_all_ranks(call: str, detail: str = "") -> Iterator[None]:
    """Watch a call that every rank has to make: after ``WAIT_S`` the first rank waiting in it names the ranks that
    have not made it. CommunicationError: a rank was lost that had not made this call."""
    store = store_of_default_group()
    if store is None:
        yield
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    visit = _count(call)
    key = f"deepspeed/{call}/{visit}"
    store.set(f"{key}/{rank}", "here")
    if visit > 2:  # all ranks have left that visit: delete its key, so that the store does not grow
        quietly(lambda: store.delete_key(f"deepspeed/{call}/{visit - 2}/{rank}"))

    def look() -> None:
        missing = _missing(clone(store), key, size)
        if missing and rank == _first_present(missing, size):
            logger.warning(
                f"rank {rank} has waited {WAIT_S:g} s in {call}({detail}) for {listed(missing)}, which did not call "
                "it. It is collective: call it on every rank, not only on rank 0 (each rank writes or reads its part)."
            )

    try:
        with _after_delay(look):
            yield
    except RuntimeError as error:
        if not isinstance(error, CommunicationError) and not is_peer_failure(error):
            raise
        missing: list[int] = []
        with contextlib.suppress(Exception):  # the store may be gone with the rank that held it
            missing = _missing(clone(store), key, size)
        if not missing:
            raise
        raise CommunicationError(
            f"{call}({detail}) is collective, and {listed(missing)} did not call it: {error}"
        ) from error


@contextlib.contextmanager
def awaiting_start(rank: int, world_size: int, address: str | None, port: str | None) -> Iterator[None]:
    """Watch the creation of the default group through a store at ``address``: name the ranks that have not been
    started."""
    if world_size <= 1 or not address or not port or not port.isdecimal():
        yield
        return
    key = f"deepspeed/start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    reports_here = rank == 1 or os.environ.get("LOCAL_RANK") == "0"

    def client() -> dist.Store:
        short = timedelta(seconds=WAIT_S)
        return dist.TCPStore(address, int(port), is_master=False, timeout=short, wait_for_workers=False)

    def post() -> None:
        store = client()
        store.set(f"{key}/{rank}", "here")
        store.check([f"{key}/{rank}"])  # wait for an answer: the connection must not be closed before

    seen: list[int] = []

    def look() -> None:
        where = f"at MASTER_ADDR={address}, MASTER_PORT={port}"
        try:
            missing = [other for other in _missing(client(), key, world_size) if other != rank]
        except RuntimeError:  # no one listens
            if reports_here and rank != 0 and seen != [0]:
                logger.warning(
                    f"rank {rank} has waited {WAIT_S:g} s for rank 0, which is not listening {where}."
                )
            seen[:] = [0]
            return
        if missing and missing != seen and rank == _first_present(missing, world_size):
            logger.warning(
                f"rank {rank} has waited {WAIT_S:g} s for {listed(missing)} of {world_size}: not started "
                f"yet, or unable to reach rank 0 {where}."
            )
        seen[:] = missing

    with _after_delay(post, wait_s=POST_S), _after_delay(look, repeat=True):
        yield
    if rank != 0:  # rank 0 may still wait for others, over the existing connection
        quietly(lambda: store_of_default_group()._underlying_non_prefix_store.set(f"{key}/{rank}", "here"))


def store_of_default_group() -> Any:
    """Return the store of the default group; None if there is no other rank, or no store."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    with contextlib.suppress(Exception):  # a group created without one
        return dist.distributed_c10d._get_default_store()
    return None


def common_key(name: str) -> str:
    """Return a store key that is the same on every rank, provided that all ranks call this equally often for
    ``name``."""
    return f"deepspeed/{name}/{_count(name)}"


def _count(call: str) -> int:
    """Count this rank's visits of ``call`` in this group: its n-th visit matches the others' n-th."""
    global _visits
    if _visits[0] is not dist.group.WORLD:
        _visits = (dist.group.WORLD, Counter())
    _visits[1][call] += 1
    return _visits[1][call]


def clone(store: Any) -> Any:
    """Return a separate connection to the store: the original may be blocked by a collective."""
    return store.clone() if hasattr(store, "clone") else store


def _missing(store: Any, key: str, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([f"{key}/{rank}"])]


def listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {first_of(ranks, 8)}"


def _first_present(missing: Sequence[int], size: int) -> int:
    return min(set(range(size)) - set(missing), default=-1)


def quietly(action: Callable[[], None]) -> None:
    """Run a best-effort action, which may fail."""
    with contextlib.suppress(Exception):
        action()


@contextlib.contextmanager
def _after_delay(
    action: Callable[[], None], *, wait_s: float | None = None, repeat: bool = False
) -> Iterator[None]:
    """Run ``action`` in a thread if the block lasts longer than ``wait_s`` (default ``WAIT_S``), once or repeatedly."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(WAIT_S if wait_s is None else wait_s):
            quietly(action)
            if not repeat:
                return

    thread = threading.Thread(target=run, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(JOIN_S)  # the interpreter must not exit while a thread is inside the store
