"""Exchange between threads of ranks through the store, while training communicates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.errors import CheckpointError, FailedElsewhere
from deepspeed.checkpoint.ranks import Ranks, StoreRanks
from deepspeed.comm import CommunicationError, store_exchange
from deepspeed.comm.store_exchange import StoreExchange
from tests.pool import distributed


def beside_training(work: Callable[[], Any]) -> Any:
    """Return the result of ``work``, run in a thread while this rank sums."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    for _ in range(50):
        dist.all_reduce(torch.ones(1))
    thread.join()
    return found[0]


@distributed(world_size=[1, 2, 3])
def test_ranks_in_a_thread_find_what_collectives_find(world_size):
    """The same questions, asked of both."""
    rank = dist.get_rank()

    def answers(ranks: Ranks) -> list[Any]:
        value = {"rank": rank, "tensor": torch.full((2,), rank), "shape": (1, rank), "text": "é"}
        found = [
            ranks.gather(value),
            ranks.gather_at_writers(value),
            ranks.agree(("same", 1)),
            ranks.agree_each(["same", rank]),
            ranks.any(rank == 1),
            ranks.any_each([rank == 1, False]),
            ranks.longest(["a"] * (1 if rank == 0 else rank)),
        ]
        with pytest.raises((KeyError, CheckpointError)) as caught, ranks.together("testing"):
            if rank == world_size - 1:
                raise KeyError("mine")
        return [repr(each) for each in [*found, caught.value]]

    thread_ranks = StoreRanks()
    thread_ranks.begin()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    in_thread = beside_training(lambda: (answers(thread_ranks), thread_ranks.end())[0])
    dist.barrier()
    assert store.num_keys() == before
    assert in_thread == answers(Ranks())


@distributed(world_size=2)
def test_each_error_says_whose_it_is():
    thread_ranks = StoreRanks()
    thread_ranks.begin()
    with pytest.raises((KeyError, FailedElsewhere)), thread_ranks.together("testing"):
        if thread_ranks.rank:
            raise KeyError("mine")
    thread_ranks.end()


@distributed(world_size=2)
def test_a_rank_that_does_not_come_is_named_and_all_give_up():
    rank = dist.get_rank()
    said: list[str] = []
    soon = timedelta(seconds=0.3 if rank == 0 else 60)
    with (
        mock.patch.multiple(store_exchange, default_timeout=lambda: soon, WAIT_S=0.1),
        mock.patch.object(store_exchange.logger, "warning", said.append),
    ):
        exchange = StoreExchange("a test")
        exchange.begin()
        if rank == 0:
            with pytest.raises(CommunicationError, match="nothing received from rank 1"):
                exchange.combine(b"0", b"".join)
            assert len(said) == 1 and "rank 1, which did not begin it" in said[0]
        dist.barrier()
        if rank:
            with pytest.raises(CommunicationError, match="nothing received from rank 1"):
                exchange.combine(b"1", b"".join)  # rank 0 does not wait any more
        exchange.begin()
        assert exchange.combine(str(rank).encode(), b" ".join) == b"0 1"
        exchange.end()


def test_it_ends_without_the_store() -> None:
    """As where the launcher, which held it, is gone: the error of the save is the one to raise."""

    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection reset")

    exchange = StoreExchange("a test")
    exchange.size, exchange._store = 2, Gone()
    exchange.end()
