"""The process group's own operations as transport: what GPUs use, tried here over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.transports import process_group
from tests.comm.transports import rank_order_sum, values
from tests.pool import distributed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
@distributed(world_size=[2, 3])
def test_operations(dtype, world_size):
    group, ranks = dist.group.WORLD, tuple(range(world_size))
    rank, scale = dist.get_rank(), 0.5 if dtype.is_floating_point else 1.0
    transport = process_group.ProcessGroupTransport(group, ranks)
    exact = {"rtol": 0, "atol": 0} if dtype != torch.float32 or world_size == 2 else {}  # the order is gloo's
    for numel in (1, 10, 5003):
        parts = [values(numel * world_size, dtype, member) for member in ranks]
        total = rank_order_sum(parts, dtype, scale)
        output = torch.empty(numel, dtype=dtype)
        transport.reduce_scatter(output, parts[rank].clone(), scale=scale).wait()
        torch.testing.assert_close(output, total.view(world_size, -1)[rank], **exact)
        gathered = torch.empty(numel * world_size, dtype=dtype)
        transport.all_gather(gathered, output).wait()
        torch.testing.assert_close(gathered, total, **exact)
        for count in (numel * world_size, numel):  # divisible by the number of ranks, or not
            reduced = parts[rank][:count].clone()
            transport.all_reduce(reduced, scale=scale).wait()
            torch.testing.assert_close(reduced, total[:count], **exact)
        largest = parts[rank].clone()
        transport.all_reduce_max(largest).wait()
        assert torch.equal(largest, torch.stack(parts).amax(0))
        copied = parts[rank].clone()
        transport.broadcast(copied, 1).wait()
        assert torch.equal(copied, parts[1])
        exchanged = torch.empty_like(gathered)
        counts = [numel] * world_size
        transport.all_to_all(exchanged, parts[rank], counts, counts).wait()
        assert torch.equal(exchanged, torch.cat([part.view(world_size, -1)[rank] for part in parts]))
        transport.barrier().wait()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@distributed(world_size=2)
def test_16_bits_into_fp32(dtype):
    parts = [values(2000, dtype, member) for member in range(2)]
    output = torch.empty(1000)
    process_group.ProcessGroupTransport(dist.group.WORLD, (0, 1)).reduce_scatter(
        output, parts[dist.get_rank()].clone()
    ).wait()
    assert torch.equal(output, (parts[0].float() + parts[1].float()).view(2, -1)[dist.get_rank()])


@distributed(world_size=2)
def test_reduce():
    tensor = torch.full((3,), float(dist.get_rank() + 1))
    transport = process_group.ProcessGroupTransport(dist.group.WORLD, (0, 1))
    transport.reduce(tensor, 1, scale=0.5).wait()
    assert dist.get_rank() == 0 or tensor.tolist() == [1.5] * 3


@distributed(world_size=1, init_process_group=False)
def test_a_fake_group_of_64_counts_traffic():
    """One process asks what 64 ranks would send; nothing is moved."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from deepspeed.comm.collectives import communicator, forget_communicators

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    try:
        comm = communicator().prepare()
        assert (comm.size, comm.rank, comm.transport_name("cpu")) == (64, 3, "process_group")
        whole, part = torch.zeros(6400, dtype=torch.bfloat16), torch.zeros(100, dtype=torch.bfloat16)
        for pending in (
            comm.reduce_scatter(part, whole),
            comm.all_gather(whole, part),
            comm.all_reduce(whole),
            comm.all_reduce_max(whole),
            comm.broadcast(whole, 0),
            comm.all_to_all(torch.zeros_like(whole), whole),
            comm.barrier(),
        ):
            pending.wait()
        assert comm.bytes_sent == (1 + 1 + 2 + 2 + 1) * 12800 * 63 // 64
    finally:
        forget_communicators()
        dist.destroy_process_group()
