"""Fetch shards from other ranks without their cooperation: a small server thread per rank.

Collectives need every rank to reach the same point, which control flow that differs by rank, generation of different
lengths, or evaluation on a single rank do not have. So every rank serves its own shards over a socket, and a rank
that needs a bucket requests the other ranks' shards. Weights do not change between two steps; a request names the
version it wants, and a rank that has not finished that update yet answers once it has.

[Note: the end of a process] A rank that finishes first would take its shards with it while others still read them.
When the interpreter exits, every rank tells the others and keeps serving until they have finished too, are gone, or
have sent no request for ``LINGER_S``. A rank that ends with an uncaught exception, or with ``sys.exit(3)`` under the
`deepspeed` command, does not linger, since its launcher waits for it. A rank that destroys or drops its engine keeps
serving in the same way, in the background. With many ranks they leave through the store (``TerminationBarrier``).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.constants import RANK_ENDED
from deepspeed.comm.collectives import CommunicationError, Communicator
from deepspeed.zero.gathering.rendezvous import Arrival, Rendezvous

# A barrier for leaving ranks, where too many ranks serve shards for each to tell every other one directly.
#
# With N ranks that would take N - 1 connections and threads on each, all at the end. Here each rank increments a
# counter in the process group's store and waits for a key that the last one sets.


DIRECT_RANKS = 64
"""Up to this many ranks tell each other directly, which also detects a rank that died without leaving."""

ASK_INTERVAL_S = 1.0  # per wait: the store serves one of several waiting threads at a time


class TerminationBarrier:
    """Termination barrier of the ``size`` ranks that share ``name``."""

    def __init__(self, store: Any, name: str, size: int) -> None:
        self._store = store
        self._size = size
        self._count, self._all = f"deepspeed/leaving/{name}/count", f"deepspeed/leaving/{name}/all"

    def arrive(self) -> None:
        """Announce that this rank will send no more requests."""
        with contextlib.suppress(RuntimeError):  # the store is gone, which ``wait`` will notice
            if self._store.add(self._count, 1) == self._size:
                self._store.set(self._all, "left")

    def wait(self, limit_s: float, served: Callable[[], int]) -> bool:
        """Wait until all ranks have arrived, or ``served()``, which counts their requests, has not changed for
        ``limit_s``. Return False if the store is gone."""
        before, quiet_since = served(), time.monotonic()
        while time.monotonic() - quiet_since < limit_s:
            try:
                self._store.wait([self._all], timedelta(seconds=min(ASK_INTERVAL_S, limit_s)))
                return True
            except dist.DistStoreError:  # not yet
                if served() != before:
                    before, quiet_since = served(), time.monotonic()
            except RuntimeError:
                return False
        return True


def make_barrier(name: str, size: int) -> TerminationBarrier | None:
    """Return the barrier; None with at most ``DIRECT_RANKS`` ranks, or without a store."""
    if size <= DIRECT_RANKS:
        return None
    with contextlib.suppress(Exception):  # the group may have been created without a store
        store: Any = dist.distributed_c10d._get_default_store()
        return TerminationBarrier(store.clone() if hasattr(store, "clone") else store, name, size)
    return None


_REQUEST = struct.Struct("<qq")  # bucket, version
_COUNT = struct.Struct("<q")
_TOKEN_BYTES = 16
_CHUNK_BYTES = 4 * 1024 * 1024
_LEAVING = -1  # instead of a bucket: close the connection when the serving rank leaves
_RENDEZVOUS = -2
"""Instead of a bucket: a message follows, the fields of a rendezvous arrival."""
LINGER_S = 60.0

_open: weakref.WeakSet[ShardServer] = weakref.WeakSet()


def _on_host(shard: Tensor, written: Any) -> Tensor:
    """Copy a shard to the host after the event ``written``, on its own stream: the training stream may be waiting for
    a collective that the requesting rank joins only after this answer."""
    accelerator: Any = get_accelerator()
    with accelerator.device(shard.device.index):
        stream = accelerator.Stream()
        stream.wait_event(written)
        with accelerator.stream(stream):
            return shard.cpu()


class ShardServer:
    """Serves this rank's ``shards[i]`` [n_i] and fetches the other ranks'.

    Every rank calls ``advance()`` after every change of its shards, all equally often.
    """

    def __init__(self, communicator: Communicator, shards: Sequence[Tensor], timeout_s: float) -> None:
        self.communicator = communicator
        self.shards = list(shards)
        self.timeout_s = timeout_s
        self.version = 0
        self.fetches = 0
        self.served = 0
        self._written = self._mark()
        self.rendezvous = Rendezvous(communicator.size)  # only rank 0's is used
        self._changed = threading.Condition()
        self._notifying = threading.Lock()
        self._closed = self._left = False
        self._peers: dict[int, socket.socket] = {}
        self._accepted: list[socket.socket] = []
        self._listener = _listen(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        mine = (*self._listener.getsockname()[:2], secrets.token_bytes(_TOKEN_BYTES))
        all_ranks: list[Any] = [None] * communicator.size
        dist.all_gather_object(all_ranks, mine, group=communicator.group)
        self._addresses: list[tuple[str, int, bytes]] = all_ranks
        self._token = all_ranks[0][2]
        self._barrier = make_barrier(self._token.hex(), communicator.size)
        threading.Thread(target=self._accept, name="shard-server", daemon=True).start()
        _open.add(self)
        # Otherwise the threads would keep the shards of an engine that was not destroyed.
        communicator.at_close(self.retire)

    def advance(self) -> None:
        written = self._mark()
        with self._changed:
            self.version += 1
            self._written = written
            self._changed.notify_all()

    def _mark(self) -> Any:
        """Return an event after which all writes to the shards so far are complete; None for shards on the host,
        where they already are."""
        if all(shard.is_cpu for shard in self.shards):
            return None
        event = get_accelerator().Event()
        event.record()
        return event

    def fetch(self, bucket: int, full: Tensor) -> None:
        """Fill ``full`` [size * n] with the shards of all ranks. CommunicationError: a rank is gone, or did not
        answer in time."""
        n = full.numel() // self.communicator.size
        mine = self.communicator.rank
        full[mine * n : (mine + 1) * n].copy_(self.shards[bucket])
        others = [rank for rank in range(self.communicator.size) if rank != mine]
        with self._whole_answers():
            for rank in others:
                try:
                    self._connection(rank).sendall(_REQUEST.pack(bucket, self.version))
                except OSError as error:
                    raise self._lost_error(rank, error) from error
            for rank in others:
                self._receive(rank, full[rank * n : (rank + 1) * n])
        self.fetches += 1

    @contextlib.contextmanager
    def _whole_answers(self) -> Iterator[None]:
        """Hang up if the block, which reads answers, raises: what is left of them would be read as the next ones."""
        try:
            yield
        except BaseException:  # Ctrl-C, too, after which scripts save the weights
            for connection in self._peers.values():
                connection.close()
            self._peers.clear()
            raise

    def _receive(self, rank: int, target: Tensor) -> None:
        host = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
        try:
            _fill(_bytes_of(host), self._connection(rank))
        except OSError as error:
            raise self._lost_error(rank, error) from error
        if host is not target:
            target.copy_(host)

    def meet(self, arrival: Arrival) -> list[int] | None:
        """Return the common order if all ranks have the intent of ``arrival``, otherwise None (``Rendezvous``)."""
        if self.communicator.rank == 0:
            return self.rendezvous.join(0, arrival)
        fields = [arrival.intent, arrival.proposal, arrival.patience_s]
        try:
            with self._whole_answers():
                connection = self._connection(0)
                connection.sendall(_REQUEST.pack(_RENDEZVOUS, 0) + pack_message(fields))
                return _read_message(connection)
        except OSError as error:
            raise self._lost_error(0, error, "announce the next gathers") from error

    def _lost_error(
        self, rank: int, error: OSError, what: str = "deliver its shard of the parameters"
    ) -> CommunicationError:
        """Make the error for an answer that did not come, because of a timeout or a rank that is gone."""
        name = f"rank {self.communicator.ranks[rank]}"
        if isinstance(error, TimeoutError):
            return CommunicationError(
                f"{name} did not {what} within {self.timeout_s:.0f} s. {RANK_ENDED} (its own log has the "
                "error) or it hangs; if it is just slow, raise the timeout: DEEPSPEED_TIMEOUT=<minutes>, or "
                "init_distributed(timeout=...)."
            )
        return CommunicationError(
            f"{name} exited before it could {what} ({error}). {RANK_ENDED} (its own log has the error) or "
            "it closed its engine long before this one."
        )

    def _connection(self, rank: int) -> socket.socket:
        if rank not in self._peers:
            host, port, _ = self._addresses[rank]
            connection = socket.create_connection((host, port), timeout=self.timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self._token + _COUNT.pack(self.communicator.rank))
            self._peers[rank] = connection
        return self._peers[rank]

    # The serving side ---------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._accepted.append(connection)
                threading.Thread(
                    target=self._serve, args=(connection,), name="shard-server", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_read(connection, _TOKEN_BYTES), self._token):
                return
            (arriving,) = _COUNT.unpack(_read(connection, _COUNT.size))
            while True:
                bucket, version = _REQUEST.unpack(_read(connection, _REQUEST.size))
                if bucket == _RENDEZVOUS:
                    arrival = Arrival(*_read_message(connection))
                    connection.sendall(pack_message(self.rendezvous.join(arriving, arrival)))
                    continue
                with self._changed:
                    if bucket == _LEAVING:
                        self._changed.wait_for(lambda: self._left or self._closed)
                        return
                    self._changed.wait_for(lambda: self.version >= version or self._closed)  # noqa: B023
                    if self._closed:
                        return
                    self.served += 1
                    # The view keeps the memory alive while it is sent, even if offload_states() moves the shard.
                    shard, written = self.shards[bucket].detach(), self._written
                connection.sendall(_bytes_of(shard if written is None else _on_host(shard, written)))

    def leave(self) -> None:
        """Tell the other ranks that this one will send no more requests (Note: the end of a process). Return once
        they have been told, by this call or another."""
        with self._notifying:
            if self._left:
                return
            with self._changed:
                self._left = True
                self._changed.notify_all()
            if self._barrier is not None:
                self._barrier.arrive()
            else:
                self._notify_all()

    def _notify_all(self) -> None:
        for rank in range(self.communicator.size):
            if rank != self.communicator.rank:
                with contextlib.suppress(OSError):
                    self._connection(rank).sendall(_REQUEST.pack(_LEAVING, 0))

    def retire(self) -> None:
        """Keep serving in the background until the other ranks leave too, then close. They may still be in the last
        gather; the shards live until then."""
        if self.communicator.size == 1 or self._left:
            return
        self.leave()
        threading.Thread(target=self._retire, name="shard-server", daemon=True).start()

    def _retire(self) -> None:
        self.linger(self.timeout_s)
        self.close()

    def linger(self, limit_s: float) -> None:
        """Serve until the other ranks leave or are gone, when they close their connections."""
        if self._barrier is not None:
            if self._barrier.wait(limit_s, lambda: self.served):
                return
            self._notify_all()
        for connection in list(self._peers.values()):
            with contextlib.suppress(OSError):
                connection.settimeout(limit_s)
                while self._has_request(connection):
                    pass

    def _has_request(self, connection: socket.socket) -> bool:
        """Wait for the connection to close, at most its timeout. Return whether requests still arrived meanwhile;
        False once it is closed."""
        served = self.served
        try:
            return bool(connection.recv(1))
        except TimeoutError:
            return self.served > served

    def close(self) -> None:
        _open.discard(self)
        with self._changed:
            self._closed = True
            self.shards = []
            self._changed.notify_all()
        self.rendezvous.close()
        for connection in (self._listener, *self._peers.values(), *self._accepted):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._peers.clear()


@atexit.register
def _leave() -> None:
    if getattr(sys, "last_value", None) is not None:
        return
    for server in list(_open):
        server.leave()
    for server in list(_open):
        server.linger(LINGER_S)
    for server in list(_open):
        server.close()  # ends the threads, which must not wake up during interpreter shutdown


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, which lives as long as the view. (``.numpy()`` would make the
    storage non-resizable.)"""
    region: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    region.tensor = tensor
    return memoryview(region).cast("B")


def _listen(master: str) -> socket.socket:
    """Listen on the address from which this host reaches the master."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))
            host = probe.getsockname()[0]
        except OSError:
            host = "127.0.0.1"
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen()
    return listener


def pack_message(value: Any) -> bytes:
    """Pack a value as JSON, after its length."""
    text = json.dumps(value).encode()
    return _COUNT.pack(len(text)) + text


def _read_message(connection: socket.socket) -> Any:
    (count,) = _COUNT.unpack(_read(connection, _COUNT.size))
    return json.loads(_read(connection, count))


def _read(connection: socket.socket, count: int) -> bytearray:
    """Read exactly ``count`` bytes. ConnectionError: the connection was closed before."""
    data = bytearray(count)
    _fill(memoryview(data), connection)
    return data


def _fill(view: memoryview, connection: socket.socket) -> None:
    while len(view):
        count = connection.recv_into(view, min(len(view), _CHUNK_BYTES))
        if count == 0:
            raise ConnectionError("the connection was closed")
        view = view[count:]
