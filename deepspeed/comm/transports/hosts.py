"""Determine which ranks of a group share a host, and connect them by shared memory."""

from __future__ import annotations

import functools
import os
import pickle
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed.base.logging import warning_once
from deepspeed.comm.groups import timeout_of
from deepspeed.comm.transports import shared_memory
from deepspeed.comm.transports.gloo import GlooChannel, GlooTransport
from deepspeed.comm.transports.shared_memory import SharedMemoryChannel

_RECORD_BYTES = 1024
"""Of a pickled `_HostRecord`, with padding: twice those of one with 2048 cores."""


def connect_hosts(
    gloo: GlooChannel, may_share_memory: bool
) -> tuple[tuple[tuple[int, ...], ...], SharedMemoryChannel | None]:
    """Determine the hosts of all ranks, and connect the ranks of each host if the whole group can and may share
    memory. Return the group ranks of each host, hosts ordered by their first rank, and the channel to the ranks of this
    one. Collective: all ranks get the same blocks, and either all get a channel or none does."""
    willing = may_share_memory and shared_memory.is_available()
    records = _gather(gloo, _HostRecord.of_this_process(willing))
    blocks = blocks_of([one.host for one in records])
    if not all(one.ready for one in records) or not are_regular(blocks):
        return blocks, None
    block = next(block for block in blocks if gloo.rank in block)
    channel, attached = _connect_host(gloo, block, records[block[0]].pid)
    if channel is None or not all(one.ready for one in attached):
        if channel is not None:
            channel.close()
        if gloo.rank == 0:
            _warn_unshared(attached)
        return blocks, None
    cores = functools.reduce(lambda union, rank: union | records[rank].cores, block, 0).bit_count()
    channel.start(timeout_of(gloo.group), cores=cores)
    return blocks, channel


def blocks_of(hosts: Sequence[bytes]) -> tuple[tuple[int, ...], ...]:
    """Group ranks by equal host, in order of first appearance."""
    found: dict[bytes, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return tuple(tuple(block) for block in found.values())


def are_regular(blocks: tuple[tuple[int, ...], ...]) -> bool:
    """Return whether all hosts have equally many consecutive ranks, more than one each."""
    length = len(blocks[0])
    regular = all(
        block == tuple(range(length * index, length * (index + 1))) for index, block in enumerate(blocks)
    )
    return regular and length > 1


def _connect_host(
    gloo: GlooChannel, block: tuple[int, ...], pid: int
) -> tuple[SharedMemoryChannel | None, list[_HostRecord]]:
    """Create the segment on the first rank of the host (process `pid`), and map it on all ranks of the block. Return
    this rank's channel, and records of which ranks have one."""
    rank = block.index(gloo.rank)
    descriptor, token = shared_memory.create_segment(len(block)) if rank == 0 else (0, 0)
    try:
        offer = _gather(gloo, _HostRecord.of_this_process(descriptor >= 0, descriptor, token))[block[0]]
        ranks = tuple(gloo.ranks[one] for one in block)
        channel = (
            shared_memory.attach(pid, offer.descriptor, offer.token, rank, ranks) if offer.ready else None
        )
        return channel, _gather(gloo, _HostRecord.of_this_process(channel is not None, offer.descriptor))
    finally:
        if rank == 0 and descriptor >= 0:
            os.close(descriptor)  # by now every rank has opened it, or failed to


def _warn_unshared(attached: list[_HostRecord]) -> None:
    errors = [one.descriptor for one in attached if one.descriptor < 0]
    reason = (
        f"creating a segment failed: {os.strerror(-errors[0])}"
        if errors
        else "a rank could not map another's"
    )
    warning_once(
        f"Ranks on one host cannot share memory ({reason}); falling back to gloo, which is several times slower."
    )


@dataclass(frozen=True, slots=True)
class _HostRecord:
    """A rank's announcement to the others before they share memory."""

    ready: bool
    pid: int
    descriptor: int
    token: int
    host: bytes
    cores: int
    """One bit per core that this process may use."""

    @classmethod
    def of_this_process(cls, ready: bool, descriptor: int = -1, token: int = 0) -> _HostRecord:
        cores = sum(1 << core for core in _usable_cores())
        return cls(ready, os.getpid(), descriptor, token, host_identity(), cores)


def _gather(gloo: GlooChannel, own: _HostRecord) -> list[_HostRecord]:
    packed = torch.zeros(_RECORD_BYTES, dtype=torch.uint8)
    data = bytearray(pickle.dumps(own))
    packed[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    everyone = torch.empty(gloo.size * _RECORD_BYTES, dtype=torch.uint8)
    GlooTransport(gloo).all_gather(everyone, packed).wait()
    return [pickle.loads(one.numpy().tobytes()) for one in everyone.view(gloo.size, -1)]


@functools.cache
def _random_identity() -> bytes:
    return secrets.token_hex(16).encode()


def host_identity() -> bytes:
    """Return an identity that two processes share exactly if they run under one kernel and see each other's process
    ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return _random_identity()  # unique
    return f"{boot} {namespace}".encode()


def _usable_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
