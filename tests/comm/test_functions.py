"""The public functions of deepspeed.comm against torch.distributed."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as torch_dist

import deepspeed
from deepspeed import comm as dist
from deepspeed.comm import CommunicationError, ReduceOp
from deepspeed.comm.init import NotInitializedError
from tests.comm.transports import TRANSPORTS, using, values
from tests.pool import distributed

RECORDED = """all_gather all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced
all_to_all_single barrier batch_isend_irecv broadcast gather inference_all_reduce irecv isend monitored_barrier recv
reduce reduce_scatter reduce_scatter_tensor scatter send""".split()


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_functions_take_the_arguments_of_the_log(name):
    parameters = inspect.signature(getattr(dist, name)).parameters
    assert list(parameters)[-3:] == ["prof", "log_name", "debug"]
    assert parameters["prof"].default is False and parameters["log_name"].default == name


def test_documented_argument_names():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(dist.all_gather_into_tensor)[:4] == ["output_tensor", "tensor", "group", "async_op"]
    assert names(dist.reduce_scatter_tensor)[:5] == ["output_tensor", "tensor", "op", "group", "async_op"]
    assert names(dist.all_to_all_single)[:4] == [
        "output",
        "tensor",
        "output_split_sizes",
        "input_split_sizes",
    ]
    assert names(dist.monitored_barrier)[:3] == ["group", "timeout", "wait_all_ranks"]
    assert names(dist.init_distributed) == [
        *("dist_backend", "auto_mpi_discovery", "distributed_port", "verbose", "timeout", "init_method"),
        *("dist_init_required", "config", "rank", "world_size"),
    ]


@distributed(world_size=1, init_process_group=False)
def test_before_initialisation():
    assert dist.is_available() and not dist.is_initialized()
    assert dist.cdb is None and deepspeed.dist is None
    with pytest.raises(NotInitializedError, match="init_distributed"):
        dist.get_rank()
    with pytest.raises(AssertionError, match="dist_init_required=False"):
        dist.init_distributed(dist_init_required=False)


@distributed(world_size=2)
def test_ranks_and_groups():
    rank = torch_dist.get_rank()
    assert dist.is_initialized() and deepspeed.dist is dist
    assert isinstance(dist.cdb, dist.TorchBackend) and dist.cdb.is_initialized()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()) == (rank, 2, rank)
    assert dist.get_world_group() is torch_dist.group.WORLD
    assert isinstance(dist.get_world_group(), dist.ProcessGroup)
    assert dist.get_all_ranks_from_group() == [0, 1]
    assert dist.get_global_rank(None, 1) == 1
    dist.init_distributed()  # nothing happens
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    assert dist.get_all_ranks_from_group(alone) == [rank]
    assert dist.get_global_rank(alone, 0) == rank
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=alone)
    assert tensor[0] == 1
    mesh = dist.initialize_mesh_device((2, 1), ("data_parallel", "sequence_parallel"))
    assert mesh["data_parallel"].size() == 2 and mesh.get_local_rank("sequence_parallel") == 0
    dist.destroy_process_group(alone)
    assert dist.is_initialized()


@distributed(world_size=2)
def test_groups_have_the_timeout_of_the_default_group():
    expected = torch_dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    made = dist.new_group([0, 1])
    assert made._get_backend(torch.device("cpu")).options._timeout == expected


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX", "MIN", "PRODUCT"])
@distributed(world_size=2)
def test_reductions(transport, async_op, op):
    with using(transport) as comm:
        parts = [values(1000, torch.float32, rank) for rank in range(2)]
        stacked = torch.stack(parts)
        expected = {
            "SUM": stacked.sum(0),
            "AVG": stacked.mean(0),
            "MAX": stacked.amax(0),
            "MIN": stacked.amin(0),
            "PRODUCT": stacked.prod(0),
        }[op]

        def finish(handle):
            assert (handle is not None) == async_op
            if handle is not None:
                handle.wait()

        for kind in (ReduceOp[op], getattr(torch_dist.ReduceOp, op)):
            tensor = parts[comm.rank].clone()
            finish(dist.all_reduce(tensor, kind, async_op=async_op))
            assert torch.equal(tensor, expected)
            if op != "AVG":  # gloo has no average for these
                tensor = parts[comm.rank].clone()
                finish(dist.reduce(tensor, 1, kind, async_op=async_op))
                assert comm.rank == 0 or torch.equal(tensor, expected)
            output = torch.empty(500)
            finish(dist.reduce_scatter_tensor(output, parts[comm.rank].clone(), kind, async_op=async_op))
            assert torch.equal(output, expected.view(2, -1)[comm.rank])
        tensor = parts[comm.rank].clone()
        finish(dist.inference_all_reduce(tensor, ReduceOp[op], async_op=async_op))
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("async_op", [False, True])
@distributed(world_size=2)
def test_copies_and_exchanges(transport, async_op):
    with using(transport) as comm:
        rank, parts = comm.rank, [values(24, torch.float32, rank) for rank in range(2)]

        def finish(handle):
            if async_op:
                handle.wait()

        tensor = parts[rank].clone()
        finish(dist.broadcast(tensor, 1, async_op=async_op))
        assert torch.equal(tensor, parts[1])
        flat = torch.empty(48)
        finish(dist.all_gather_into_tensor(flat, parts[rank], async_op=async_op))
        assert torch.equal(flat, torch.cat(parts))
        dist.allgather_fn(matrix := torch.empty(2, 4, 6), parts[rank].view(4, 6))
        assert torch.equal(matrix.view(-1), torch.cat(parts))
        listed = [torch.empty(24), torch.empty(24)]
        finish(dist.all_gather(listed, parts[rank], async_op=async_op))
        assert torch.equal(torch.cat(listed), torch.cat(parts))
        output = torch.empty(24)
        finish(dist.all_to_all_single(output, parts[rank], async_op=async_op))
        assert torch.equal(output, torch.cat([part.view(2, 12)[rank] for part in parts]))
        runs = list(torch.empty(24).chunk(2))
        finish(dist.all_to_all(runs, list(parts[rank].chunk(2)), async_op=async_op))
        assert torch.equal(torch.cat(runs), output)
        output = torch.empty(12)
        finish(dist.reduce_scatter(output, list(parts[rank].chunk(2)), async_op=async_op))
        assert torch.equal(output, (parts[0] + parts[1]).view(2, 12)[rank])
        dist.reduce_scatter_fn(output, parts[rank].clone())
        assert torch.equal(output, (parts[0] + parts[1]).view(2, 12)[rank])
        finish(dist.gather(parts[rank], listed if rank == 0 else None, dst=0, async_op=async_op))
        assert torch.equal(torch.cat(listed), torch.cat(parts))
        output = torch.empty(24)
        finish(dist.scatter(output, parts if rank == 1 else None, src=1, async_op=async_op))
        assert torch.equal(output, parts[rank])
        finish(dist.barrier(async_op=async_op))
        dist.monitored_barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("async_op", [False, True])
@distributed(world_size=2)
def test_coalesced(transport, async_op):
    with using(transport) as comm:
        tensors = [torch.full((n,), float(comm.rank + n)) for n in (3, 1, 5)] + [
            torch.full((2,), 4, dtype=torch.int64)
        ]
        handle = dist.all_reduce_coalesced(tensors, async_op=async_op)
        if async_op:
            handle.wait()
        assert [tensor[0].item() for tensor in tensors] == [7, 3, 11, 8]
        outputs = [torch.empty(2 * n) for n in (3, 4)]
        handle = dist.all_gather_coalesced(
            outputs, [torch.full((n,), float(comm.rank)) for n in (3, 4)], async_op=async_op
        )
        if async_op:
            handle.wait()
        assert outputs[0].tolist() == [0.0] * 3 + [1.0] * 3 and outputs[1].tolist() == [0.0] * 4 + [1.0] * 4


@distributed(world_size=2)
def test_pairs_of_ranks_and_objects():
    rank = dist.get_rank()
    tensor = torch.full((4,), float(rank))
    if rank == 0:
        dist.send(tensor, 1)
        dist.isend(tensor + 5, 1, tag=3).wait()
        dist.recv(tensor)
    else:
        assert dist.recv(tensor, 0) == 0 and tensor[0] == 0
        dist.irecv(tensor, 0, tag=3).wait()
        assert tensor[0] == 5
        dist.send(tensor * 2, 0)
    assert tensor[0] == (10 if rank == 0 else 5)
    everyone = [None, None]
    dist.all_gather_object(everyone, {"rank": rank})
    assert everyone == [{"rank": 0}, {"rank": 1}]
    objects = ["from", rank]
    dist.broadcast_object_list(objects, 1)
    assert objects == ["from", 1]


@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_size=2)
def test_tensors_out_of_the_ordinary(transport):
    """Strides that differ between ranks, booleans, complex numbers."""
    with using(transport) as comm:
        matrix = torch.arange(6.0).view(3, 2) * (comm.rank + 1)
        if comm.rank == 1:
            matrix = matrix.t().contiguous().t()
            assert not matrix.is_contiguous()
        dist.all_reduce(matrix)
        assert torch.equal(matrix, 3 * torch.arange(6.0).view(3, 2))
        dist.broadcast(matrix, 0)
        gathered = torch.empty(6, 2)
        dist.all_gather_into_tensor(gathered, matrix)
        assert torch.equal(gathered, torch.cat([matrix, matrix]))
        scattered = torch.empty(6, 2)[::2] if comm.rank else torch.empty(3, 2)
        dist.reduce_scatter_tensor(scattered, gathered)
        assert torch.equal(scattered, 2 * matrix)
        flags = torch.tensor([comm.rank == 0, True])
        dist.all_reduce(flags, ReduceOp.MIN)
        assert flags.tolist() == [False, True]
        phases = torch.tensor([1 + 1j * comm.rank])
        dist.broadcast(phases, 1)
        assert phases[0] == 1 + 1j


@distributed(world_size=2)
def test_a_batch_of_messages() -> None:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    received = [torch.zeros(3), torch.zeros(2)]
    messages = [dist.P2POp(dist.isend, torch.full((3,), float(rank)), other)]
    messages += [
        dist.P2POp(dist.irecv, received[0], other),
        dist.P2POp(dist.irecv, received[1], other, tag=1),
    ]
    messages.append(dist.P2POp(dist.isend, torch.full((2,), 7.0 + rank), other, tag=1))
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    assert received[0].eq(other).all() and received[1].eq(7 + other).all()
    with pytest.raises(ValueError, match="must be deepspeed.comm.isend"):
        dist.P2POp(torch_dist.isend, received[0], other)


@distributed(world_size=2)
def test_a_missing_partner_is_a_communication_error():
    from datetime import timedelta

    group = torch_dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(
            CommunicationError, match=r"gather among ranks \[0, 1\] failed.*DEEPSPEED_TIMEOUT"
        ):
            dist.gather(torch.ones(1), [torch.ones(1), torch.ones(1)], group=group)
