"""The documented sums of lists of tensors, against a plain all-reduce."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed.runtime.comm.coalesced_collectives import (
    all_to_all_loco_quant_reduce,
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


@distributed(world_size=2)
def test_the_error_of_quantization_is_made_good_later() -> None:
    torch.manual_seed(dist.get_rank())
    param = torch.nn.Parameter(torch.zeros(8, 32))
    with pytest.raises(ValueError, match="gradient"):
        all_to_all_loco_quant_reduce([param], {})
    param.grad = torch.randn(8, 32)
    expected = part_of_average(param.grad)
    once = all_to_all_loco_quant_reduce([param], {})[0]
    total = torch.zeros_like(once)
    for _ in range(40):
        total += all_to_all_loco_quant_reduce([param], {}, {"err_beta": 0.0, "reset_T": 1000})[0]
    assert (total / 40 - expected).abs().max() < 0.1 * (once - expected).abs().max()
