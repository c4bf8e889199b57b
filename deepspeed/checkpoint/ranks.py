"""Ranks that save or load together: they fail together and report which of them failed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed import comm as dist
from deepspeed.base.accelerator import get_accelerator
from deepspeed.checkpoint.errors import FailedElsewhere
from deepspeed.checkpoint.files.archive_reader import deserialize
from deepspeed.checkpoint.files.archive_writer import serialize
from deepspeed.comm.store_exchange import StoreExchange

MESSAGE_BYTES = 4096
"""Size of a message whose length only one rank knows."""


class Ranks:
    """All ranks of the job, or this process alone without a process group.

    ``node_local``: every node writes to its own folder, for which the first rank of the node is responsible;
    otherwise rank 0 is responsible for the one folder.
    """

    def __init__(self, *, node_local: bool = False) -> None:
        self.active = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.active else 0
        self.size = dist.get_world_size() if self.active else 1
        self.node_local = node_local
        self.shares_folder = not node_local
        """True if all ranks are meant to write into one folder."""
        self.keeps_folder = self.rank == 0 or (node_local and dist.get_local_rank() == 0)

    def gather(self, value: Any) -> list[Any]:
        """Return ``value`` of every rank, in rank order."""
        if not self.active:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather_at_writers(self, value: Any) -> list[Any] | None:
        """Return ``value`` of every rank, in rank order, on ranks responsible for a folder; None elsewhere."""
        if not self.active:
            return [value]
        if self.node_local:
            everything = self.gather(value)
            return everything if self.keeps_folder else None
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        torch.distributed.gather_object(value, values)
        return values

    def agree(self, value: Any) -> bool:
        """Return whether ``repr(value)`` is the same on all ranks; the message size does not grow with the world
        size."""
        return all(self.agree_each([value]))

    def agree_each(self, values: list[Any]) -> list[bool]:
        """Call ``agree`` for each of ``values``, in one message; every rank passes the same number."""
        if not self.active:
            return [True] * len(values)
        hashes = [_hash(value) for value in values]
        extremes = self.largest([*hashes, *(-found for found in hashes)])
        count = len(values)
        return [extremes[i] == -extremes[count + i] for i in range(count)]

    def any(self, value: bool) -> bool:
        """Return whether ``value`` is true on any rank."""
        return self.any_each([value])[0]

    def any_each(self, values: Sequence[bool | int]) -> list[bool]:
        """Call ``any`` for each of ``values``, in one message; every rank passes the same number."""
        return [bool(value) for value in self.largest(values)]

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the maximum over ranks of each of ``values`` [below 2**63]; every rank passes the same number."""
        if not self.active or not values:
            return list(values)
        device = get_accelerator().current_device_name()
        found = torch.tensor(values, dtype=torch.int64, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()

    def longest(self, value: list[str]) -> list[str] | None:
        """Return the longest of the ranks' lists, the lowest rank's in a tie; None if it exceeds one message of
        ``MESSAGE_BYTES``."""
        if not self.active:
            return value
        text = json.dumps(value).encode()
        first = self.largest([len(value) * self.size + self.size - 1 - self.rank])[0]
        source = self.size - 1 - first % self.size
        message = text.ljust(MESSAGE_BYTES) if len(text) <= MESSAGE_BYTES else bytes(MESSAGE_BYTES)
        device = get_accelerator().current_device_name()
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
        dist.broadcast(sent, src=source)
        received = bytes(sent.tolist()).rstrip()
        return None if not any(received) else json.loads(received)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run a block on every rank and wait for all; an error on any rank is raised on all.

        The block must not communicate, as a failing rank leaves it early.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:  # any error must reach the other ranks, which would otherwise hang
            problem = error
        if not self.any(problem is not None):
            return
        reports = self.gather(None if problem is None else f"{type(problem).__name__}: {problem}")
        failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
        if problem is not None:
            raise problem
        if failed:
            rank, report = failed[0]
            others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise FailedElsewhere(f"{what} failed on rank {rank}{others}: {report}")


class StoreRanks(Ranks):
    """The same ranks, for background threads: they communicate through the store while training uses the collectives.
    ``begin`` is called by the training thread, the rest by the background thread."""

    def __init__(self, *, node_local: bool = False) -> None:
        super().__init__(node_local=node_local)
        self._exchange = StoreExchange("a background save")

    def begin(self) -> None:
        """Begin an exchange; every rank calls it at the same point of its program."""
        self._exchange.begin()

    def end(self) -> None:
        self._exchange.end()

    def gather(self, value: Any) -> list[Any]:
        if not self.active:
            return [value]
        combined = self._exchange.combine(serialize(value), serialize)
        return [deserialize(each) for each in deserialize(combined)]

    def gather_at_writers(self, value: Any) -> list[Any] | None:
        if not self.active or self.node_local:
            return super().gather_at_writers(value)
        values: list[bytes] = []

        def keep(found: list[bytes]) -> bytes:
            values.extend(found)
            return b""

        self._exchange.combine(serialize(value), keep)
        return [deserialize(each) for each in values] if self.rank == 0 else None

    def longest(self, value: list[str]) -> list[str] | None:
        if not self.active:
            return value
        text = json.dumps(value).encode()
        return json.loads(
            self._exchange.combine(text, lambda found: max(found, key=lambda each: len(json.loads(each))))
        )

    def largest(self, values: Sequence[int]) -> list[int]:
        if not self.active or not values:
            return list(values)
        return json.loads(self._exchange.combine(json.dumps(list(map(int, values))).encode(), _largest))


def _largest(found: list[bytes]) -> bytes:
    """Return the element-wise maximum of lists of one length."""
    return json.dumps([max(each) for each in zip(*map(json.loads, found), strict=True)]).encode()


def _hash(value: Any) -> int:
    """Return a 63-bit hash of ``repr(value)``, the same in every process."""
    text = repr(value).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
