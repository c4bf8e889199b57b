"""Every operation of a Communicator against sums and copies that one process makes, on each transport."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.collectives import communicator
from deepspeed.comm.groups import new_group
from deepspeed.comm.transports import gloo
from tests.comm.transports import TRANSPORTS, rank_order_sum, same_bits, using, values
from tests.pool import distributed

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, *INTEGERS]
SIZES = [1, 7, 1000, 100_003]
LARGE = 1_500_007  # several pieces and slots on either transport

on_transports = pytest.mark.parametrize("transport", TRANSPORTS)


def scales_of(dtype: torch.dtype) -> tuple[float, ...]:
    return (1.0, 0.25, 1 / 3) if dtype.is_floating_point else (1.0,)


@on_transports
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@distributed(world_size=[1, 2, 3])
def test_reduce_scatter_sums_in_rank_order_and_rounds_once(transport, dtype, world_size):
    with using(transport) as comm:
        for numel in SIZES:
            parts = [values(numel * world_size, dtype, rank) for rank in range(world_size)]
            own = slice(comm.rank * numel, (comm.rank + 1) * numel)
            for scale in scales_of(dtype):
                expected = rank_order_sum(parts, dtype, scale)[own]
                output = torch.empty(numel, dtype=dtype)
                given = parts[comm.rank].clone()
                comm.reduce_scatter(output, given, scale=scale).wait()
                assert same_bits(output, expected)
                assert same_bits(given, parts[comm.rank])
                comm.reduce_scatter(given[own], given, scale=scale).wait()
                assert same_bits(given[own], expected)


@on_transports
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@distributed(world_size=[1, 2, 3])
def test_reduce_scatter_of_16_bits_into_fp32_does_not_round(transport, dtype, world_size):
    with using(transport) as comm:
        parts = [values(5000 * world_size, dtype, rank) for rank in range(world_size)]
        output = torch.empty(5000)
        comm.reduce_scatter(output, parts[comm.rank].clone(), scale=0.5).wait()
        assert same_bits(output, rank_order_sum(parts, torch.float32, 0.5).view(world_size, -1)[comm.rank])


@on_transports
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@distributed(world_size=[1, 2, 3])
def test_all_reduce_equals_reduce_scatter_and_all_gather(transport, dtype, world_size):
    with using(transport) as comm:
        for numel in SIZES:
            parts = [values(numel, dtype, rank) for rank in range(world_size)]
            for scale in scales_of(dtype):
                reduced = parts[comm.rank].clone()
                comm.all_reduce(reduced, scale=scale).wait()
                assert same_bits(reduced, rank_order_sum(parts, dtype, scale))
                share = -(-numel // world_size)
                padded = torch.zeros(share * world_size, dtype=dtype)
                padded[:numel] = parts[comm.rank]
                own = padded[comm.rank * share : (comm.rank + 1) * share]
                comm.reduce_scatter(own, padded, scale=scale).wait()
                comm.all_gather(padded, own).wait()
                assert same_bits(padded[:numel], reduced)


@on_transports
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
@distributed(world_size=[1, 2, 3])
def test_all_gather(transport, dtype, world_size):
    with using(transport) as comm:
        for numel in SIZES:
            raw = [values(numel * dtype.itemsize, torch.uint8, rank) % 2 for rank in range(world_size)]
            expected = torch.cat(raw).view(dtype)
            output = torch.zeros(numel * world_size, dtype=dtype)
            comm.all_gather(output, raw[comm.rank].view(dtype).clone()).wait()
            assert same_bits(output, expected)
            in_place = torch.zeros(numel * world_size, dtype=dtype)
            own = in_place[comm.rank * numel : (comm.rank + 1) * numel]
            own.view(torch.uint8).copy_(raw[comm.rank])
            comm.all_gather(in_place, own).wait()
            assert same_bits(in_place, expected)


@on_transports
@distributed(world_size=[2, 3])
def test_several_pieces(transport, world_size):
    with using(transport) as comm:
        for dtype in (torch.float32, torch.bfloat16):
            parts = [values(LARGE, dtype, rank) for rank in range(world_size)]
            tensor = parts[comm.rank].clone()
            comm.all_reduce(tensor).wait()
            assert same_bits(tensor, rank_order_sum(parts, dtype))
            gathered = torch.empty(LARGE * world_size, dtype=dtype)
            comm.all_gather(gathered, parts[comm.rank]).wait()
            assert same_bits(gathered, torch.cat(parts))


@on_transports
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@distributed(world_size=[1, 2, 3])
def test_max_broadcast_and_reduce(transport, dtype, world_size):
    with using(transport) as comm:
        for numel in SIZES:
            parts = [values(numel, dtype, rank) for rank in range(world_size)]
            largest = parts[comm.rank].clone()
            comm.all_reduce_max(largest).wait()
            assert same_bits(largest, torch.stack(parts).amax(0))
            for root in range(world_size):
                copied = parts[comm.rank].clone()
                comm.broadcast(copied, root).wait()
                assert same_bits(copied, parts[root])
                summed = parts[comm.rank].clone()
                comm.reduce(summed, root).wait()
                expected = rank_order_sum(parts, dtype) if comm.rank == root else parts[comm.rank]
                assert same_bits(summed, expected)


@on_transports
@distributed(world_size=[2, 3])
def test_max_of_infinities(transport, world_size):
    with using(transport) as comm:
        flag = torch.tensor([float("inf") if comm.rank == 1 else 0.0, -float("inf"), -1.0 - comm.rank])
        comm.all_reduce_max(flag).wait()
        assert flag.tolist() == [float("inf"), -float("inf"), -1.0]


@on_transports
@distributed(world_size=[1, 2, 3])
def test_all_to_all_with_even_and_uneven_runs(transport, world_size):
    with using(transport) as comm:
        for unit in (1, 1000, 60_000):
            # Rank r sends (r + 2 s) % 3 units to rank s.
            counts = [[unit * ((r + 2 * s) % 3) for s in range(world_size)] for r in range(world_size)]
            sent = [values(sum(counts[rank]), torch.float32, rank) for rank in range(world_size)]
            runs = [sent[rank].split(counts[rank]) for rank in range(world_size)]
            received = [counts[rank][comm.rank] for rank in range(world_size)]
            output = torch.empty(sum(received))
            comm.all_to_all(output, sent[comm.rank], received, counts[comm.rank]).wait()
            assert torch.equal(output, torch.cat([runs[rank][comm.rank] for rank in range(world_size)]))

            even = [values(unit * world_size, torch.bfloat16, rank) for rank in range(world_size)]
            output = torch.empty(unit * world_size, dtype=torch.bfloat16)
            comm.all_to_all(output, even[comm.rank]).wait()
            expected = torch.cat([even[rank].view(world_size, -1)[comm.rank] for rank in range(world_size)])
            assert same_bits(output, expected)


@on_transports
@distributed(world_size=[2, 3, 4])
def test_bits_do_not_depend_on_the_cut(transport, world_size):
    with using(transport) as comm:
        whole = values(50_000, torch.float32, comm.rank)
        cut = whole.clone()
        comm.all_reduce(whole).wait()
        bounds = [0, 1, 17, 4096, 4097, 30_000, 50_000]
        pendings = [comm.all_reduce(cut[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
        for pending in reversed(pendings):
            pending.wait()
        assert same_bits(cut, whole)


@distributed(world_size=[2, 3])
def test_bits_do_not_depend_on_the_scratch(world_size):
    default = gloo.SCRATCH_BYTES
    results = []
    try:
        for scratch in (default, 40_000, 1000):
            gloo.SCRATCH_BYTES = scratch
            with using("gloo") as comm:
                tensor = values(60_001, torch.float16, comm.rank)
                comm.all_reduce(tensor, scale=1 / 3).wait()
                results.append(tensor)
    finally:
        gloo.SCRATCH_BYTES = default
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@on_transports
@distributed(world_size=[2, 3])
def test_many_in_flight_waited_in_different_order(transport, world_size):
    with using(transport) as comm:
        sizes = [10, 700_000, 3, 50_000, 1_000_000, 1]
        tensors = [values(numel, torch.float32, comm.rank, seed) for seed, numel in enumerate(sizes)]
        gathered = [torch.empty(numel * world_size) for numel in sizes]
        pendings = [comm.all_gather(full, tensor) for full, tensor in zip(gathered, tensors, strict=True)]
        for pending in pendings:
            pending.wait()
        pendings = [comm.all_reduce(tensor) for tensor in tensors]
        order = list(range(len(sizes)))
        for index in order[comm.rank :] + order[: comm.rank]:
            pendings[index].wait()
            pendings[index].wait()
        for seed, (numel, tensor, full) in enumerate(zip(sizes, tensors, gathered, strict=True)):
            parts = [values(numel, torch.float32, rank, seed) for rank in range(world_size)]
            assert same_bits(tensor, rank_order_sum(parts, torch.float32))
            assert same_bits(full, torch.cat(parts))


@on_transports
@distributed(world_size=2)
def test_a_pending_that_nobody_waits_for_still_finishes(transport):
    with using(transport) as comm:
        for _ in range(3):
            tensor = torch.full((300_000,), float(comm.rank + 1))
            comm.all_reduce(tensor)  # the handle is dropped at once
            other = torch.ones(10_000)
            comm.all_reduce(other).wait()
            assert other[0] == 2 and tensor[-1] == 3


@on_transports
@distributed(world_size=[1, 2])
def test_parameters_shapes_and_empty_tensors(transport, world_size):
    with using(transport) as comm:
        parameter = torch.nn.Parameter(torch.full((3, 4), float(comm.rank)))
        version = parameter._version
        comm.all_reduce(parameter).wait()
        assert parameter.shape == (3, 4) and parameter.grad_fn is None
        assert parameter[0, 0] == world_size * (world_size - 1) / 2
        assert parameter._version >= version
        comm.broadcast(parameter, 0).wait()
        before = comm.bytes_sent
        empty = torch.empty(0)
        for pending in (
            comm.all_reduce(empty),
            comm.all_gather(empty, empty),
            comm.reduce_scatter(empty, empty),
            comm.broadcast(empty, 0),
        ):
            pending.wait()
        assert comm.bytes_sent == before


@on_transports
@distributed(world_size=[1, 2, 4])
def test_traffic_is_counted(transport, world_size):
    with using(transport) as comm:
        comm.reset_counters()
        numel = 12_000
        whole, part = (
            torch.zeros(numel, dtype=torch.bfloat16),
            torch.zeros(numel // world_size, dtype=torch.bfloat16),
        )
        comm.reduce_scatter(part, whole).wait()
        assert comm.bytes_sent == 2 * numel * (world_size - 1) // world_size
        comm.all_gather(whole, part).wait()
        assert comm.bytes_sent == 4 * numel * (world_size - 1) // world_size
        comm.all_reduce(whole).wait()
        assert comm.bytes_sent == 8 * numel * (world_size - 1) // world_size
        expected = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1} if world_size > 1 else {}
        assert comm.collectives == expected
        assert communicator() is comm


@distributed(world_size=2)
def test_integers_are_not_scaled():
    for transport in TRANSPORTS:
        with using(transport) as comm, pytest.raises(ValueError, match="int64"):
            comm.all_reduce(torch.ones(3, dtype=torch.int64), scale=0.5).wait()


@distributed(world_size=[2, 4])
def test_transports_agree(world_size):
    results = []
    for transport in TRANSPORTS:
        with using(transport) as comm:
            tensors = [
                values(70_001, dtype, comm.rank) for dtype in (torch.float32, torch.bfloat16, torch.float16)
            ]
            for tensor in tensors:
                comm.all_reduce(tensor, scale=1 / 3).wait()
            results.append(tensors)
    assert all(same_bits(left, right) for left, right in zip(*results, strict=True))


@distributed(world_size=4)
def test_overlapping_groups_at_once():
    rank = dist.get_rank()
    rows = communicator(new_group([rank // 2 * 2, rank // 2 * 2 + 1]))
    columns = communicator(new_group([rank % 2, rank % 2 + 2]))
    everyone = communicator()
    for _ in range(10):
        tensors = [torch.full((200_000,), float(rank)) for _ in range(3)]
        pendings = [
            comm.all_reduce(tensor) for comm, tensor in zip((rows, columns, everyone), tensors, strict=True)
        ]
        for index in range(3) if rank % 2 else reversed(range(3)):
            pendings[index].wait()
        assert [tensor[7].item() for tensor in tensors] == [sum(rows.ranks), sum(columns.ranks), 6.0]


@on_transports
@distributed(world_size=2)
def test_tensors_that_do_not_fit_are_refused(transport):
    with using(transport) as comm:
        with pytest.raises(
            ValueError, match=r"all_gather among ranks \[0, 1\].*output is torch.float32 \(3,\)"
        ):
            comm.all_gather(torch.empty(3), torch.empty(2))
        with pytest.raises(ValueError, match="of one dtype"):
            comm.all_gather(torch.empty(4), torch.empty(2, dtype=torch.float16))
        with pytest.raises(ValueError, match="expected input = 2 x output"):
            comm.reduce_scatter(torch.empty(3), torch.empty(4))
        with pytest.raises(ValueError, match="runs"):
            comm.all_to_all(torch.empty(3), torch.empty(3), [1, 2], [1, 1])
        with pytest.raises(ValueError, match="meta"):
            comm.all_gather(torch.empty(4, device="meta"), torch.empty(2))
