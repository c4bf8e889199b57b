"""Groups that span hosts: shared memory inside, gloo between, and the same bits as gloo alone."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.collectives import forget_communicators
from deepspeed.comm.pending import CommunicationError
from deepspeed.comm.reduction import sum_in_blocks, sum_in_order
from deepspeed.comm.transports import gloo, hierarchical
from deepspeed.comm.transports.hosts import are_regular, blocks_of
from tests.comm.transports import rank_order_sum, same_bits, two_hosts, using, values
from tests.pool import distributed


def test_blocks():
    assert blocks_of([b"a", b"b", b"a", b"c"]) == ((0, 2), (1,), (3,))
    regular = {((0, 1, 2),): True, ((0, 1), (2, 3)): True, ((0,), (1,)): False, ((0,),): False}
    regular |= {((0, 2), (1, 3)): False, ((0, 1), (2,)): False}
    assert {blocks: are_regular(blocks) for blocks in regular} == regular


def test_sums_in_blocks():
    parts = [values(1000, torch.float32, rank) for rank in range(4)]
    output, expected = torch.empty(1000), torch.empty(1000)
    sum_in_blocks(output, parts, ((0, 1), (2, 3)), 0.5)
    assert same_bits(output, ((parts[0] + parts[1]) + (parts[2] + parts[3])) * 0.5)
    for blocks in (((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))):
        sum_in_blocks(output, parts, blocks)
        sum_in_order(expected, parts)
        assert same_bits(output, expected)


def two_level_sum(parts, dtype, scale=1.0):
    """Per host unrounded, then over the two hosts."""
    half = len(parts) // 2
    wide = torch.float32 if dtype.is_floating_point and dtype != torch.float64 else dtype
    return rank_order_sum(
        [rank_order_sum(parts[:half], wide), rank_order_sum(parts[half:], wide)], dtype, scale
    )


@pytest.mark.parametrize("transport", ["gloo", "hierarchical"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@distributed(world_size=4)
def test_every_operation(transport, dtype):
    with two_hosts(), using(transport) as comm:
        scale = 1 / 3 if dtype.is_floating_point else 1.0
        for numel in (1, 1003, 60_000):
            parts = [values(4 * numel, dtype, rank) for rank in range(4)]
            total, mine = (
                two_level_sum(parts, dtype, scale),
                slice(comm.rank * numel, (comm.rank + 1) * numel),
            )
            given = parts[comm.rank].clone()
            comm.reduce_scatter(given[mine], given, scale=scale).wait()
            assert same_bits(given[mine], total[mine])
            comm.all_gather(given, given[mine]).wait()
            assert same_bits(given, total)
            for count in (4 * numel, numel):
                reduced = parts[comm.rank][:count].clone()
                comm.all_reduce(reduced, scale=scale).wait()
                assert same_bits(reduced, total[:count])
            largest = parts[comm.rank].clone()
            comm.all_reduce_max(largest).wait()
            assert same_bits(largest, torch.stack(parts).amax(0))
            for root in range(4):
                copied = parts[comm.rank].clone()
                comm.broadcast(copied, root).wait()
                assert same_bits(copied, parts[root])
                summed = parts[comm.rank].clone()
                comm.reduce(summed, root, scale=scale).wait()
                assert same_bits(summed, total if comm.rank == root else parts[comm.rank])
            # Rank r sends (r + 2 s) % 3 runs to rank s.
            counts = [[numel * ((r + 2 * s) % 3) for s in range(4)] for r in range(4)]
            sent = [values(sum(counts[rank]), dtype, rank) for rank in range(4)]
            received = [counts[rank][comm.rank] for rank in range(4)]
            output = torch.empty(sum(received), dtype=dtype)
            comm.all_to_all(output, sent[comm.rank], received, counts[comm.rank]).wait()
            assert same_bits(output, torch.cat([sent[r].split(counts[r])[comm.rank] for r in range(4)]))
            comm.barrier().wait()


@distributed(world_size=4)
def test_pieces_types_and_order_of_waiting():
    default = gloo.SCRATCH_BYTES
    try:
        hierarchical.SCRATCH_BYTES = 4000
        with two_hosts(), using("hierarchical") as comm:
            parts = [values(40_000, torch.bfloat16, rank) for rank in range(4)]
            wide = torch.empty(10_000)
            tensors = [parts[comm.rank].clone() for _ in range(3)]
            pendings = [comm.all_reduce(tensor) for tensor in tensors]
            pendings.append(comm.reduce_scatter(wide, parts[comm.rank]))
            for pending in pendings if comm.rank % 2 else reversed(pendings):
                pending.wait()
            expected = two_level_sum(parts, torch.bfloat16)
            assert all(same_bits(tensor, expected) for tensor in tensors)
            unrounded = two_level_sum([part.float() for part in parts], torch.float32)
            assert same_bits(wide, unrounded.view(4, -1)[comm.rank])
            waves = torch.full((3,), 1 + 2j, dtype=torch.complex64)  # a dtype that only the exchange sums
            comm.all_reduce(waves).wait()
            assert waves[0] == 4 + 8j
    finally:
        hierarchical.SCRATCH_BYTES = default


@distributed(world_size=4)
def test_nobody_leaves_a_barrier_before_all_have_come():
    with two_hosts(), using("hierarchical") as comm:
        for late in range(4):
            comm.barrier().wait()
            if comm.rank == late:
                time.sleep(0.1)
            # One clock for all processes of a host.
            came = torch.tensor([time.monotonic()], dtype=torch.float64)
            comm.barrier().wait()
            left = time.monotonic()
            torch.distributed.all_reduce(came, torch.distributed.ReduceOp.MAX)
            assert left >= came.item()


@distributed(world_size=4)
def test_less_crosses_the_network():
    """Bytes that go through gloo: each rank exchanges only with its counterpart on the other host."""
    sent = {}
    original = gloo.GlooChannel.send

    def counting(self, tensor, peer, tag, operation):
        if peer // 2 != self.rank // 2:
            sent[transport] = sent.get(transport, 0) + tensor.nbytes
        return original(self, tensor, peer, tag, operation)

    gloo.GlooChannel.send = counting
    try:
        for transport in ("gloo", "hierarchical"):
            with two_hosts(), using(transport) as comm:
                sent[transport] = 0
                tensor = torch.ones(40_000)
                comm.all_gather(tensor, tensor[comm.rank * 10_000 : (comm.rank + 1) * 10_000]).wait()
                comm.reduce_scatter(torch.empty(10_000), tensor).wait()
    finally:
        gloo.GlooChannel.send = original
    assert sent == {"gloo": 4 * 40_000, "hierarchical": 2 * 40_000}


@distributed(world_size=4)
def test_a_gather_crosses_between_hosts_before_it_is_waited_for():
    with two_hosts(), using("hierarchical") as comm:
        output, mine = torch.zeros(4, 1000), torch.full((1000,), comm.rank + 1.0)
        counterpart = (comm.rank + 2) % 4
        pending = comm.all_gather(output.view(-1), mine)
        deadline = time.monotonic() + 20
        while not bool((output[counterpart] == counterpart + 1).all()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        pending.wait()
        assert torch.equal(output, torch.arange(1.0, 5.0).unsqueeze(1).expand(4, 1000))


@distributed(world_size=4)
def test_waiting_after_the_group_is_destroyed_raises():
    """Its shared memory is unmapped by then."""
    with two_hosts(), using("hierarchical") as comm:
        pending = comm.barrier()
        forget_communicators(dist.group.WORLD)
        with pytest.raises(CommunicationError, match="the process group was destroyed here"):
            pending.wait()
