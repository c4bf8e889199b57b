"""Ranks as threads of one process: what a plan computes, without the start of processes.

``run_ranks(2, work)`` calls ``work(group)`` on two threads; their ``Communicator``s exchange tensors through memory. A
backward on the CPU runs on the thread that calls it, so that collectives in it are this rank's.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator
from deepspeed.comm.pending import DONE, Pending

TIMEOUT = 120.0


class ThreadExchange:
    """Where the ranks of one run exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order."""
        self._values[rank] = value
        self.barrier.wait()
        values = list(self._values)
        self.barrier.wait()
        return values


class ThreadGroup(Communicator):
    """The communicator of one thread."""

    def __init__(self, shared: ThreadExchange, rank: int) -> None:
        self.shared, self.rank, self.size = shared, rank, shared.size
        self.ranks = tuple(range(shared.size))
        self.collectives: Counter[str] = Counter()
        self.bytes_sent = 0

    def _every(self, tensor: Tensor) -> list[Tensor]:
        return self.shared.exchange(self.rank, tensor.detach().clone())

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        self.collectives["all_reduce"] += 1
        tensor.copy_(torch.stack(self._every(tensor)).sum(0) * scale)
        return DONE

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        self.collectives["all_reduce_max"] += 1
        tensor.copy_(torch.stack(self._every(tensor)).amax(0))
        return DONE

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        self.collectives["all_gather"] += 1
        output.view(-1).copy_(torch.cat([each.reshape(-1) for each in self._every(input)]))
        return DONE

    def reduce_scatter(self, output: Tensor, input: Tensor, *, scale: float = 1.0) -> Pending:
        self.collectives["reduce_scatter"] += 1
        total = torch.stack(self._every(input)).sum(0).view(self.size, -1)
        output.view(-1).copy_(total[self.rank] * scale)
        return DONE

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        self.collectives["broadcast"] += 1
        tensor.copy_(self._every(tensor)[src])
        return DONE


def run_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Return the results of ``work`` on each rank. An error on one rank ends all, and is raised here."""
    shared = ThreadExchange(size)
    results: list[Any] = [None] * size
    errors: list[tuple[BaseException, str]] = []

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(shared, rank))
        except BaseException as error:
            errors.append((error, traceback.format_exc()))
            shared.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        causes = [each for each in errors if not isinstance(each[0], threading.BrokenBarrierError)] or errors
        raise RuntimeError(causes[0][1]) from causes[0][0]
    return results
