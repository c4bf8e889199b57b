"""Dropout: one rank's where tensors are replicated, different ones where they are in parts."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

import deepspeed
from deepspeed.parallel.tensor.random_numbers import draw_differently, draw_equally
from deepspeed.transforms.recompute.rng import RegionRNG, share_random_states
from tests.parallel.tensor.blocks import Model, batch, split, tensor_parallel
from tests.pool import distributed


def gathered(tensor: Tensor) -> list[Tensor]:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return every


@distributed(world_size=2)
def test_replicated_dropout_is_that_of_one_rank() -> None:
    model = split(Model(dropout=0.3), tensor_parallel().communicator("tp"))
    reference = Model(dropout=0.3)
    torch.manual_seed(5)
    expected = reference(*batch())
    torch.manual_seed(5)
    torch.testing.assert_close(model(*batch()), expected, rtol=1e-5, atol=1e-6)


@distributed(world_size=2)
def test_states_are_shared_and_parts_differ() -> None:
    group = tensor_parallel().communicator("tp")
    torch.manual_seed(dist.get_rank())
    share_random_states(group)
    numbers = RegionRNG(group)
    own = draw_differently(nn.Dropout(), numbers)
    inner = draw_equally(nn.Dropout(), numbers)
    assert isinstance(own, nn.Dropout)
    ones = torch.ones(64)
    one, other = gathered(own(ones))
    assert not torch.equal(one, other)
    again, _ = gathered(own(ones))
    assert not torch.equal(one, again)  # the next region has other numbers
    for drawn in (torch.rand(64), inner(ones)):
        one, other = gathered(drawn)
        assert torch.equal(one, other)
    with numbers.different():
        first, equal, second = torch.rand(64), inner(ones), torch.rand(64)
    assert not torch.equal(first, second)
    for drawn, same in ((first, False), (equal, True), (second, False), (torch.rand(64), True)):
        one, other = gathered(drawn)
        assert torch.equal(one, other) is same
    own.eval()
    assert torch.equal(own(ones), ones)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "deepspeed"])
@distributed(world_size=2)
def test_recomputation_draws_the_same(how: str) -> None:
    group = tensor_parallel().communicator("tp")
    numbers = RegionRNG(group)
    inner = draw_equally(nn.Dropout(0.3), numbers)
    outer = draw_differently(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8), inner), numbers)
    checkpoint = {
        "reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
        "non-reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
        "deepspeed": deepspeed.transforms.recompute.checkpointing.checkpoint,
    }[how]
    inputs = torch.randn(4, 8, requires_grad=True)

    def gradient(call: object) -> Tensor:
        torch.manual_seed(3)
        inputs.grad = None
        made = call(outer, inputs) + call(outer, inputs)  # type: ignore[operator]
        made.square().sum().backward()
        assert inputs.grad is not None
        return inputs.grad

    assert torch.equal(gradient(lambda function, given: function(given)), gradient(checkpoint))
