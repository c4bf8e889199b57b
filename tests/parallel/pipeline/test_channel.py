"""Messages of any kind and size, one after the other, whatever was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm.transports.host_messages import Edge, NeighbourReceiver, NeighbourSender, connect
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages.channels import (
    LocalReceiver,
    LocalSender,
    Receiver,
    SameStageChannel,
    Sender,
)
from tests.pool import distributed

MESSAGES: list[Any] = [
    torch.arange(6.0).view(2, 3),
    torch.arange(6.0).view(2, 3).requires_grad_(),  # as many bytes, with a new description
    [torch.full((size,), float(size)) for size in range(30)],  # a description longer than a frame
    [torch.full((size,), float(size)) for size in range(1, 31)],  # and another one
    (None, True, -3, 2.5, "note"),  # no bytes
    {"mask": torch.tensor([True, False]), "rest": (torch.ones((), dtype=torch.bfloat16), torch.empty(0, 4))},
    torch.arange(100_000),
    torch.arange(100_000),
    torch.ones(1),
]


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two) and one.dtype == two.dtype and one.requires_grad == two.requires_grad
    if isinstance(one, (tuple, list)):
        return type(one) is type(two) and all(map(same, one, two)) and len(one) == len(two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    return type(one) is type(two) and one == two


def over_group() -> tuple[Sender, Receiver]:
    own, other = dist.get_rank(), 1 - dist.get_rank()
    device = torch.device("cpu")
    return Sender(other, None, device, own), Receiver(other, None, device, other)


def over_memory() -> tuple[LocalSender, LocalReceiver]:
    own = dist.get_rank()
    assert dist.group.WORLD is not None
    ends = connect(dist.group.WORLD, [Edge(0, 0, 1), Edge(1, 1, 0)], may_share_memory=True)
    sender, receiver = ends[own], ends[1 - own]
    assert isinstance(sender, NeighbourSender) and isinstance(receiver, NeighbourReceiver)
    return LocalSender(sender), LocalReceiver(receiver)


@pytest.mark.parametrize("make", [over_group, over_memory])
@distributed(world_size=2)
def test_any_message(make: Callable[[], tuple[Any, Any]]) -> None:
    sender, receiver = make()
    for _ in range(2):  # two batches
        receiver.post_receives(len(MESSAGES))
        for number, message in enumerate(MESSAGES):
            sender.send(message)
            assert same(receiver.receive(len(MESSAGES) - number - 1), message), number
        sender.flush()
    assert (sender.sent, receiver.received) == (2 * len(MESSAGES), 2 * len(MESSAGES))
    assert sender.described == 2 * len(MESSAGES) - 2


@distributed(world_size=2)
def test_a_lost_message_is_noticed() -> None:
    own, other = dist.get_rank(), 1 - dist.get_rank()
    sender = Sender(other, None, torch.device("cpu"), own)
    receiver = Receiver(other, None, torch.device("cpu"), other)
    receiver.received = 1
    sender.send(torch.ones(1))
    with pytest.raises(PipelineError, match="sent message 0 in batch 0, but 1 was expected"):
        receiver.receive()
    dist.recv(torch.empty(4, dtype=torch.uint8), other, tag=other)
    sender.flush()


@distributed(world_size=2)
def test_a_lost_message_is_noticed_in_shared_memory() -> None:
    sender, receiver = over_memory()
    receiver.received = 1
    sender.send(torch.ones(1))
    with pytest.raises(PipelineError, match="sent message 0 in batch 0, but 1 was expected"):
        receiver.receive()
    dist.barrier()


def test_between_chunks_of_one_stage() -> None:
    handover = SameStageChannel()
    weight = torch.ones(2, requires_grad=True)
    handover.send((weight * 2, torch.arange(3)))
    value, numbers = handover.receive()
    assert value.is_leaf and value.requires_grad and not numbers.requires_grad
    assert value.tolist() == [2.0, 2.0]
