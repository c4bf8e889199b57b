"""One-way, ordered messages between two ranks of a host, through shared memory.

A message is a *note*, which travels through a pipe, and bytes, which the sender copies into a block of shared memory
and the receiver uses in place. A block is free again when the receiver's last tensor of it is freed, which a second
pipe reports to the sender. A sender never waits for room: there are as many blocks as the receiver holds at a time.
Neither blocks nor pipes have names: the other process opens them through /proc/<pid>/fd, and nothing remains after a
kill. A waiting rank sleeps in a poll of the pipe and of the other process, uses no core, and wakes as soon as either
is ready.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import struct
import sys
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.base.logging import warning_once
from deepspeed.comm.groups import timeout_of
from deepspeed.comm.pending import CommunicationError
from deepspeed.comm.transports.hosts import host_identity

_HEAD = struct.Struct("=qqqqq")  # bytes of the note and of the data, block, its file in the sender, its size
_NONE = -1
_FREED = struct.Struct("=q")
_SENDING, _RECEIVING = "sending to a neighbour", "receiving from a neighbour"
_GONE = "its process has exited"
_EXIT_GRACE_MS = 2000  # an ending process closes its pipes before it is gone; long before on busy cores
_MAX_POLL_MS = 2**31 - 1  # longest wait of a poll
BLOCK_BYTES = 1 << 16  # block sizes are multiples of it, so that messages of varying size reuse blocks


@dataclass(frozen=True, slots=True)
class Edge:
    """A one-way connection between two global ranks. ``key``: the same on both sides, unique per edge."""

    key: Hashable
    source: int
    target: int


class _Peer:
    """The process at the other end. CommunicationError: it is gone, has closed its end, or timed out."""

    def __init__(self, rank: int, ranks: tuple[int, ...], pid: int, timeout: timedelta) -> None:
        self.rank, self.ranks, self.pid = rank, ranks, pid
        self.timeout_ms = min(timeout.total_seconds() * 1e3, _MAX_POLL_MS)
        self.process = os.pidfd_open(pid)

    def await_ready(self, descriptor: int, events: int, operation: str) -> None:
        """Wait until ``descriptor`` is ready for ``events``, or its other end is closed."""
        poll = select.poll()
        poll.register(descriptor, events)
        poll.register(self.process, select.POLLIN)
        found = dict(poll.poll(self.timeout_ms))
        if descriptor not in found:
            raise self.error(operation, _GONE if found else "it did not arrive within the timeout")

    def closed_error(self, operation: str) -> CommunicationError:
        """Return the error for a closed peer end."""
        return self.error(operation, _GONE if self.has_ended() else "it has closed its end of the connection")

    def has_ended(self) -> bool:
        """Return whether the peer's process has ended, or ends within ``_EXIT_GRACE_MS``."""
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(_EXIT_GRACE_MS))

    def error(self, operation: str, reason: str) -> CommunicationError:
        return CommunicationError.of(operation, self.ranks, RuntimeError(reason), silent=self.rank)

    def map(self, file: int, size: int) -> mmap.mmap:
        """Map the memory behind one of the peer's descriptors."""
        try:
            descriptor = os.open(f"/proc/{self.pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if self.has_ended():
                raise self.error(_RECEIVING, _GONE) from error
            raise self.error(_RECEIVING, f"its shared memory cannot be opened: {error}") from error
        try:
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)


class _End:
    """One end of an edge: descriptors that are closed together, once, and only in the process that opened them."""

    def __init__(self, peer: _Peer, notes: int, freed: int) -> None:
        self.peer, self.notes, self.freed = peer, notes, freed
        self.owner = os.getpid()
        self.open = True
        for descriptor in (notes, freed):
            os.set_blocking(descriptor, False)

    @property
    def usable(self) -> bool:
        """Return False after ``close`` and in a forked child."""
        return self.open and os.getpid() == self.owner

    def check(self, operation: str) -> None:
        if not self.usable:
            raise self.peer.error(operation, "this end of the connection is closed")

    def close(self) -> None:
        if self.open:
            self.open = False
            _close(self.notes, self.freed, self.peer.process)

    def __del__(self) -> None:
        self.close()


@dataclass(slots=True)
class _Block:
    """A block of the sender's shared memory. ``announced``: whether a message has named ``file`` to the receiver."""

    file: int
    nbytes: int
    memory: Tensor
    announced: bool = False

    @classmethod
    def of(cls, nbytes: int) -> _Block:
        nbytes = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        file = os.memfd_create("deepspeed", os.MFD_CLOEXEC)
        os.fchmod(file, 0o600)
        os.ftruncate(file, nbytes)
        return cls(file, nbytes, torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8))

    def __del__(self) -> None:
        _close(self.file)


class NeighbourSender:
    """Sends to the rank ``peer``; the data may change once ``send`` returns."""

    def __init__(self, end: _End) -> None:
        self._end = end
        self.peer, self.ranks = end.peer.rank, end.peer.ranks
        self._blocks: list[_Block] = []
        self._free: list[int] = []
        self._unopened: set[int] = set()

    def send(self, note: bytes, nbytes: int, fill: Callable[[Tensor], None]) -> None:
        """Send a note and ``nbytes`` of data, which ``fill(memory)`` writes into uint8 [nbytes]."""
        self._end.check(_SENDING)
        self._read_notices()
        number, file, size = _NONE, _NONE, 0
        if nbytes:
            number = self._block_for(nbytes)
            block = self._blocks[number]
            fill(block.memory[:nbytes])
            if not block.announced:
                file, size, block.announced = block.file, block.nbytes, True
                self._unopened.add(number)
        self._write(_HEAD.pack(len(note), nbytes, number, file, size) + note)

    def _block_for(self, nbytes: int) -> int:
        """Take the smallest free block that is large enough; else a new one, which replaces the largest free one."""
        fitting = [number for number in self._free if self._blocks[number].nbytes >= nbytes]
        if fitting:
            number = min(fitting, key=lambda number: self._blocks[number].nbytes)
            self._free.remove(number)
            return number
        if not self._free:
            self._blocks.append(_Block.of(nbytes))
            return len(self._blocks) - 1
        number = max(self._free, key=lambda number: self._blocks[number].nbytes)
        self._free.remove(number)
        self._blocks[number] = _Block.of(nbytes)
        return number

    def _read_notices(self) -> bool:
        """Read the receiver's reports on blocks: opened, or free again. Return False if the receiver is gone."""
        try:
            while data := os.read(self._end.freed, 512 * _FREED.size):
                for (number,) in _FREED.iter_unpack(data):
                    if number >= 0:
                        self._free.append(number)
                    else:
                        self._unopened.discard(~number)
        except BlockingIOError:
            return True
        return False

    def _write(self, data: bytes) -> None:
        end, left = self._end, memoryview(data)
        while left:
            try:
                left = left[os.write(end.notes, left) :]
            except BlockingIOError:
                end.peer.await_ready(end.notes, select.POLLOUT, _SENDING)
            except BrokenPipeError:
                raise end.peer.closed_error(_SENDING) from None

    def flush(self) -> None:
        """Wait until everything sent can be received even if this process ends."""
        peer = self._end.peer
        while self._unopened and self._end.usable:
            there = self._read_notices()
            if self._unopened and not there:
                raise peer.closed_error(_SENDING)
            if self._unopened:
                peer.await_ready(self._end.freed, select.POLLIN, _SENDING)

    def close(self) -> None:
        self._end.close()
        self._blocks, self._free = [], []


class NeighbourReceiver:
    """Receives from the ``NeighbourSender`` at the rank ``peer``."""

    def __init__(self, end: _End) -> None:
        self._end = end
        self.peer, self.ranks = end.peer.rank, end.peer.ranks
        self._blocks: dict[int, mmap.mmap] = {}

    def receive(self) -> tuple[bytes, Tensor]:
        """Receive the next note and its data, uint8 [bytes], in shared memory that is reserved until the tensor is
        freed."""
        note_bytes, nbytes, number, file, size = _HEAD.unpack(self._read(_HEAD.size))
        note = self._read(note_bytes)
        if number == _NONE:
            return note, torch.empty(0, dtype=torch.uint8)
        if file != _NONE:
            self._blocks[number] = self._end.peer.map(file, size)
            _notify(self._end, ~number)
        memory = (ctypes.c_uint8 * nbytes).from_buffer(self._blocks[number])
        weakref.finalize(memory, _notify, self._end, number).atexit = False
        return note, torch.frombuffer(memory, dtype=torch.uint8)

    def _read(self, count: int) -> bytes:
        end = self._end
        end.check(_RECEIVING)
        parts: list[bytes] = []
        while count:
            try:
                part = os.read(end.notes, count)
            except BlockingIOError:
                end.peer.await_ready(end.notes, select.POLLIN, _RECEIVING)
                continue
            if not part:
                raise end.peer.closed_error(_RECEIVING)
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close this end; received tensors stay valid."""
        self._end.close()
        self._blocks = {}


def _notify(end: _End, number: int) -> None:
    """Notify the sender, if it still exists, that block ``number`` is free, or (``~number``) that it
    has been opened."""
    if end.usable:
        with contextlib.suppress(OSError):
            os.write(end.freed, _FREED.pack(number))


@dataclass(frozen=True, slots=True)
class _Record:
    """A rank's announcement to the others: its host and, by key, the descriptors that a sender opens: the write end
    of the pipe of notes, and the read end of the pipe of freed blocks."""

    host: bytes
    pid: int
    offered: dict[Hashable, tuple[int, int]]


def connect(
    group: ProcessGroup, edges: Sequence[Edge], *, may_share_memory: bool
) -> Mapping[Hashable, NeighbourSender | NeighbourReceiver]:
    """Connect the ``edges`` whose ranks share a host and may share memory; return this rank's ends by key. Collective
    over the group, whose ranks pass the same edges."""
    ranks, own = tuple(dist.get_process_group_ranks(group)), dist.get_rank()
    willing = may_share_memory and _is_supported()
    pipes = _pipes([edge.key for edge in edges if edge.target == own]) if willing else {}
    offered = {key: (notes[1], freed[0]) for key, (notes, freed) in pipes.items()}
    record = _Record(host_identity() if willing else b"", os.getpid(), offered)
    opened: dict[Hashable, tuple[int, int]] = {}
    try:
        known = dict(zip(ranks, _exchanged(record, group), strict=True))
        denied: set[Hashable] = set()
        for edge in edges:
            other = known[edge.target if edge.source == own else edge.source]
            if not willing or own not in (edge.source, edge.target) or other.host != record.host:
                continue
            if edge.source == own and (found := _open(other, edge.key)):
                opened[edge.key] = found
            elif edge.source == own or not _may_open_files_of(other.pid):
                denied.add(edge.key)
        answers = _exchanged((set(opened), denied), group)
        done = {key for keys, _ in answers for key in keys} - {key for _, keys in answers for key in keys}
        if denied:
            _warn_unshared()
        made: dict[Hashable, NeighbourSender | NeighbourReceiver] = {}
        for edge in edges:
            if edge.key not in done:
                continue
            if edge.source == own:
                peer = _Peer(edge.target, ranks, known[edge.target].pid, timeout_of(group))
                made[edge.key] = NeighbourSender(_End(peer, *opened.pop(edge.key)))
            elif edge.target == own:
                peer = _Peer(edge.source, ranks, known[edge.source].pid, timeout_of(group))
                (reads, writes), (reads_freed, writes_freed) = pipes.pop(edge.key)
                os.close(writes)  # so that the pipe ends with the sender
                os.close(reads_freed)
                made[edge.key] = NeighbourReceiver(_End(peer, reads, writes_freed))
        return made
    finally:  # close unused descriptors
        for notes, freed in pipes.values():
            _close(*notes, *freed)
        for descriptors in opened.values():
            _close(*descriptors)


def _is_supported() -> bool:
    """Return whether this system has the required calls."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("deepspeed", os.MFD_CLOEXEC))
    except (OSError, AttributeError):  # an old kernel, or a Python built for one
        return False
    return True


def _pipes(keys: Sequence[Hashable]) -> dict[Hashable, tuple[tuple[int, int], tuple[int, int]]]:
    """Open a pipe for notes and one for freed blocks by key, for as many keys as descriptors allow."""
    made: dict[Hashable, tuple[tuple[int, int], tuple[int, int]]] = {}
    for key in keys:
        try:
            notes = os.pipe()
        except OSError:
            break
        try:
            made[key] = (notes, os.pipe())
        except OSError:
            _close(*notes)
            break
    return made


def _may_open_files_of(pid: int) -> bool:
    """Return whether another process's descriptors can be opened."""
    try:
        return bool(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _warn_unshared() -> None:
    warning_once(
        "Neighbouring ranks on one host cannot open each other's descriptors (different users, or hidden "
        "processes); falling back to the slower process group."
    )


def _open(record: _Record, key: Hashable) -> tuple[int, int] | None:
    """Open the sender's ends of another process's pipes; None if not permitted."""
    if key not in record.offered:
        return None
    notes, freed = (f"/proc/{record.pid}/fd/{descriptor}" for descriptor in record.offered[key])
    try:
        writes = os.open(notes, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return writes, os.open(freed, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        os.close(writes)
        return None


def _exchanged(value: Any, group: ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
