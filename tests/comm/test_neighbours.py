"""Messages between two ranks of one host, through shared memory."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm.pending import CommunicationError
from deepspeed.comm.transports import host_messages as neighbours
from deepspeed.comm.transports.host_messages import Edge, NeighbourReceiver, NeighbourSender, connect
from tests.comm.transports import run_two_ranks
from tests.pool import distributed


def pair() -> NeighbourSender | NeighbourReceiver:
    """From rank 0 to rank 1."""
    assert dist.group.WORLD is not None
    return connect(dist.group.WORLD, [Edge("way", 0, 1)], may_share_memory=True)["way"]


def send(end: NeighbourSender, data: Tensor, note: bytes = b"") -> None:
    data = data.view(-1).view(torch.uint8)
    end.send(note, data.numel(), lambda memory: memory.copy_(data))


@distributed(world_size=2)
def test_messages_keep_their_order_and_lie_where_they_were_put() -> None:
    end, count = pair(), 40
    if isinstance(end, NeighbourSender):
        data = torch.empty(0)
        for number in range(count):
            data = torch.full((1000 * (number % 7),), number)
            send(end, data, b"note %d" % number)
            data.fill_(-1)  # what was sent is the receiver's
        end.flush()
    else:
        for number in range(count):
            note, data = end.receive()
            assert note == b"note %d" % number
            assert data.view(torch.int64).tolist() == [number] * (1000 * (number % 7))
            assert data.data_ptr() % 64 == 0 or not data.numel()
    dist.barrier()
    end.close()


@distributed(world_size=2)
def test_as_many_blocks_as_are_held() -> None:
    """Only a tensor that is kept keeps its block."""
    end, held = pair(), 3
    everything: list[Tensor] = []
    for number in range(20):
        if isinstance(end, NeighbourSender):
            send(end, torch.full((5000,), number))
            dist.barrier()
            dist.barrier()
            assert len(end._blocks) <= held + 1
        else:
            dist.barrier()
            everything.append(end.receive()[1].view(torch.int64)[1:])  # a part of it is enough
            assert [each[0].item() for each in everything] == list(range(max(0, number - held), number + 1))
            del everything[:-held]
            dist.barrier()
    if isinstance(end, NeighbourSender):
        send(end, torch.zeros(100_000))  # larger than any: replaces a free block
        assert len(end._blocks) == held + 1
    else:
        assert end.receive()[1].numel() == 400_000
        end.close()
        assert everything[0][0].item() == 17  # stays valid
    dist.barrier()
    end.close()


@distributed(world_size=2)
def test_many_messages_ahead_and_long_notes() -> None:
    """More than a pipe holds: the sender waits for the receiver, no longer."""
    end, note = pair(), bytes(100_000)
    if isinstance(end, NeighbourSender):
        for _ in range(5):
            send(end, torch.ones(3), note)
    else:
        for _ in range(5):
            found, data = end.receive()
            assert found == note and data.view(torch.float32).tolist() == [1.0] * 3
    dist.barrier()
    end.close()


@distributed(world_size=2)
def test_a_closed_end_is_named() -> None:
    end = pair()
    if dist.get_rank() == 0:
        end.close()
        dist.barrier()
        with pytest.raises(CommunicationError, match="this end of the connection is closed"):
            send(end, torch.ones(1))  # type: ignore[arg-type]
    else:
        dist.barrier()
        with pytest.raises(CommunicationError, match="waiting for rank 0: it has closed its end"):
            end.receive()  # type: ignore[union-attr]
        end.close()


@distributed(world_size=2)
def test_where_memory_may_not_be_shared_there_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dist.group.WORLD is not None
    edges = [Edge("way", 0, 1), Edge("back", 1, 0)]
    for end in connect(
        dist.group.WORLD, edges, may_share_memory=True
    ).values():  # gloo has its own descriptors now
        end.close()
    before = os.listdir("/proc/self/fd")
    assert connect(dist.group.WORLD, edges, may_share_memory=dist.get_rank() == 0) == {}
    monkeypatch.setattr(neighbours, "host_identity", lambda: b"%d" % dist.get_rank())  # two hosts
    assert connect(dist.group.WORLD, edges, may_share_memory=True) == {}
    monkeypatch.undo()
    monkeypatch.setattr(neighbours, "_open", lambda record, key: None)  # not allowed
    assert connect(dist.group.WORLD, edges, may_share_memory=True) == {}
    for end in connect(dist.group.WORLD, edges, may_share_memory=True).values():
        end.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@distributed(world_size=2)
def test_what_does_not_come_in_time_is_named() -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    assert group is not None
    end = connect(group, [Edge("way", 0, 1)], may_share_memory=True)["way"]
    if isinstance(end, NeighbourReceiver):
        with pytest.raises(
            CommunicationError, match="waiting for rank 0: it did not arrive within the timeout"
        ):
            end.receive()
    dist.barrier()
    end.close()
    dist.destroy_process_group(group)


KILLED = """
import os, signal, sys, time
import torch, torch.distributed as dist
from deepspeed.comm.transports.host_messages import Edge, connect
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=os.environ["TEST_STORE"], rank=rank, world_size=2)
ends = connect(dist.group.WORLD, [Edge(0, 0, 1), Edge(1, 1, 0)], may_share_memory=True)
sender, receiver = ends[rank], ends[1 - rank]
sender.send(b"", 1 << 20, lambda memory: memory.fill_(7))
if rank == 1:
    receiver.receive()
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    receiver.receive()  # what it sent, unless its memory went with it before this rank opened it
    receiver.receive()
except RuntimeError as error:
    print(error, f"after {time.monotonic() - begin:.3f} s", flush=True)
    os._exit(3)
"""


def named_memory() -> set[str]:
    """Other programs' data loaders apart."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("torch_")}


def test_a_killed_rank_is_noticed_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    before = named_memory()
    codes, output, seconds = run_two_ranks(KILLED, tmp_path)
    assert codes == (3, -signal.SIGKILL), output
    assert "waiting for rank 1: its process has exited" in output
    assert seconds < 50
    assert named_memory() <= before
