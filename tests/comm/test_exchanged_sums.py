"""Sums of 16-bit tensors on backends that would round at each hop: bits, bytes on each kind of link, and scratch."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.transports import exchanged_sums, hosts, process_group
from tests.comm.test_hierarchical import two_level_sum
from tests.comm.transports import rank_order_sum, same_bits, two_hosts, values
from tests.pool import distributed


@contextlib.contextmanager
def counted_bytes(ranks_per_host: int) -> Iterator[Counter[str]]:
    """Count the bytes that this rank sends in exchanges, to ranks of its host and of others."""
    sent: Counter[str] = Counter()
    original = dist.all_to_all_single

    def counting(output, input, *args, group, **kwargs):
        share = input.nbytes // group.size()
        own = dist.get_rank()
        for rank in dist.get_process_group_ranks(group):
            if rank != own:
                sent["inside" if rank // ranks_per_host == own // ranks_per_host else "across"] += share
        return original(output, input, *args, group=group, **kwargs)

    dist.all_to_all_single = counting
    try:
        yield sent
    finally:
        dist.all_to_all_single = original


@contextlib.contextmanager
def scratch(nbytes: int) -> Iterator[None]:
    before, exchanged_sums.SCRATCH_BYTES = exchanged_sums.SCRATCH_BYTES, nbytes
    try:
        yield
    finally:
        exchanged_sums.SCRATCH_BYTES = before


@pytest.mark.parametrize("scratch_bytes", [1 << 20, 4096, 1])
@pytest.mark.parametrize("layout", ["one host", "two hosts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@distributed(world_size=4)
def test_bits(dtype: torch.dtype, layout: str, scratch_bytes: int) -> None:
    """Rank order on each host in fp32, then over hosts, rounded once: as on every other transport."""
    ranks, rank = tuple(range(4)), dist.get_rank()
    total_of = two_level_sum if layout == "two hosts" else rank_order_sum
    with two_hosts() if layout == "two hosts" else contextlib.nullcontext(), scratch(scratch_bytes):
        transport = process_group.ProcessGroupTransport(dist.group.WORLD, ranks)
        scatter, reduce = transport.reduce_scatter, transport.all_reduce
        for numel in (1, 203) if scratch_bytes > 1 else (5,):
            parts = [values(4 * numel, dtype, member) for member in ranks]
            total = total_of(parts, dtype, 1 / 3).view(4, -1)[rank]
            output, given = torch.empty(numel, dtype=dtype), parts[rank].clone()
            scatter(output, given, scale=1 / 3).wait()
            assert same_bits(output, total) and same_bits(given, parts[rank])
            wide = torch.empty(numel)
            scatter(wide, given).wait()
            assert same_bits(wide, total_of([p.float() for p in parts], torch.float32).view(4, -1)[rank])
            scatter(given[rank * numel : (rank + 1) * numel], given, scale=1 / 3).wait()  # into its own slice
            assert same_bits(given[rank * numel : (rank + 1) * numel], total)
            for count in (4 * numel, numel):
                reduced = parts[rank][:count].clone()
                reduce(reduced, scale=1 / 3).wait()
                assert same_bits(reduced, total_of([p[:count] for p in parts], dtype, 1 / 3))


@distributed(world_size=4)
def test_bytes_on_two_hosts_with_two_ranks() -> None:
    numel, ranks = 1000, (0, 1, 2, 3)
    tensor, output = torch.ones(4 * numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.bfloat16)
    for hierarchical in (False, True):
        with two_hosts() if hierarchical else contextlib.nullcontext():
            sums = exchanged_sums.ExchangedSum(dist.group.WORLD, ranks)
            sums.reduce_scatter(output, tensor, 1.0).wait()  # the rendezvous is over
            with counted_bytes(2) as sent:
                sums.reduce_scatter(output, tensor, 1.0).wait()
            assert (
                sent
                == {
                    False: {"inside": 2 * numel, "across": 2 * 2 * numel},
                    True: {
                        "inside": 2 * 2 * numel,
                        "across": 4 * numel,
                    },  # slices for both hosts; one fp32 sum
                }[hierarchical]
            )


@pytest.mark.parametrize("ranks_per_host", [2, 4, 8, 16])
@distributed(world_size=1, init_process_group=False)
def test_bytes_between_hosts_do_not_grow_with_their_ranks(ranks_per_host: int) -> None:
    """Eight hosts on a fake group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = 8 * ranks_per_host
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=size)
    blocks = tuple(tuple(range(first, first + ranks_per_host)) for first in range(0, size, ranks_per_host))
    original, hosts.blocks_of = hosts.blocks_of, lambda _: blocks
    try:
        sums = exchanged_sums.ExchangedSum(dist.group.WORLD, tuple(range(size)))
        numel = 1 << 16
        tensor = torch.zeros(numel, dtype=torch.bfloat16)
        with counted_bytes(ranks_per_host) as sent:
            sums.reduce_scatter(torch.zeros(numel // size, dtype=torch.bfloat16), tensor, 1.0).wait()
        assert ranks_per_host * sent["across"] == 4 * numel * 7 // 8
        assert sent["inside"] == 2 * numel * (ranks_per_host - 1) // ranks_per_host
    finally:
        hosts.blocks_of = original
        dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["one host", "two hosts"])
@distributed(world_size=4)
def test_scratch_is_bounded_and_none_is_kept(layout: str) -> None:
    """Counted at the exchanges: gloo's threads free what they have worked on, which a count of this thread misses."""
    numel, limit, taken = 50_000, 1 << 16, []
    given = [torch.ones(4 * numel, dtype=torch.bfloat16) for _ in range(4)]
    outputs = [torch.empty(numel, dtype=torch.bfloat16) for _ in range(4)]
    original = exchanged_sums.ExchangedSum._exchange

    def exchange(self, sent, group):
        received = original(self, sent, group)
        taken.append(max(sent.nbytes, received.nbytes))
        return received

    exchanged_sums.ExchangedSum._exchange = exchange
    try:
        with two_hosts() if layout == "two hosts" else contextlib.nullcontext(), scratch(limit):
            sums = exchanged_sums.ExchangedSum(dist.group.WORLD, (0, 1, 2, 3))
            pending = [sums.reduce_scatter(o, g, 1.0) for o, g in zip(outputs, given, strict=True)]
    finally:
        exchanged_sums.ExchangedSum._exchange = original
    assert limit / 2 < max(taken) <= limit < given[0].nbytes
    # Nobody has waited yet, and nothing is held for it.
    assert all(one.is_completed() for one in pending) and all((output == 4).all() for output in outputs)
