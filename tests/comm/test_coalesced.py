"""The documented sums of lists of tensors, against a plain all-reduce."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.compat.runtime_comm import coalesced_collectives
from deepspeed.compat.runtime_comm.coalesced_collectives import (
    all_to_all_quant_reduce,
    reduce_scatter_coalesced,
)
from tests.pool import distributed


def part_of_average(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach().double()
    dist.all_reduce(whole)
    chunk = -(-tensor.numel() // dist.get_world_size())
    return (whole / dist.get_world_size()).view(-1)[dist.get_rank() * chunk :][:chunk]


@distributed(world_size=[1, 2, 3])
def test_each_rank_gets_its_part_of_every_average(world_size: int) -> None:
    torch.manual_seed(dist.get_rank())
    tensors = [torch.randn(shape) for shape in ((7,), (3, 4), (1,), ())]
    tensors += [torch.randn(6).bfloat16(), torch.zeros(0)]
    before = [tensor.clone() for tensor in tensors]
    for output, tensor, old in zip(reduce_scatter_coalesced(tensors), tensors, before, strict=True):
        expected = part_of_average(old)
        assert output.dtype == tensor.dtype and output.shape == expected.shape
        slack = 1e-2 if tensor.dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(output.double(), expected, rtol=slack, atol=slack)
        assert torch.equal(tensor, old)


@distributed(world_size=4)
def test_quantized_sums_within_and_across_groups() -> None:
    rank = dist.get_rank()
    near = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    far = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = {f"local_{rank // 2}": near[rank // 2], f"global_{rank % 2}": far[rank % 2]}
    torch.manual_seed(rank)
    matrix, vector, uneven = torch.randn(16, 24), torch.randn(9), torch.randn(3, 5)
    for known in ({}, groups):
        packed, plain, odd = all_to_all_quant_reduce([matrix, vector, uneven], known)
        expected = part_of_average(matrix)
        assert packed.shape == expected.shape and packed.dtype == matrix.dtype
        assert (packed - expected).abs().max() < 0.5  # largest magnitude / 7 is a step of 4 bits
        assert torch.allclose(plain.double(), part_of_average(vector), atol=1e-6)
        assert torch.allclose(odd.double(), part_of_average(uneven), atol=1e-6)


class PretendedRanks:
    """Rank 1 of many that all have the same tensors."""

    rank = 1

    def __init__(self, size: int) -> None:
        self.size = size

    def reduce_scatter(self, own: torch.Tensor, packed: torch.Tensor, scale: float) -> Any:
        own.copy_(packed.view(self.size, -1)[self.rank] * self.size * scale)
        return types.SimpleNamespace(wait=lambda: None)


class Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ranks", [2, 1024])
def test_packing_takes_two_copies_of_a_tensor_however_many_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended = PretendedRanks(ranks)
    monkeypatch.setattr(coalesced_collectives, "communicator", lambda group: pretended)
    tensors = [torch.randn(numel) for numel in (1, 7, 1023, 1024, 1025, 5000)]
    with Copies() as copies:
        outputs = reduce_scatter_coalesced(tensors, object())
    assert copies.count <= 2 * len(tensors) + 1  # one is the collective's
    for output, tensor in zip(outputs, tensors, strict=True):
        chunk = -(-tensor.numel() // ranks)
        assert torch.allclose(output, tensor[chunk : 2 * chunk])
