"""Documented operations that run in PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from deepspeed.ops.adam.multi_tensor_apply import MultiTensorApply
from deepspeed.ops.quantizer import ds_quantizer
from deepspeed.ops.transformer.inference.bias_add import nhwc_bias_add
from deepspeed.ops.triton_ops.group_gemm_triton import group_gemm_triton
from deepspeed.ops.triton_ops.swiglu_triton import swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_values_are_levels_of_their_group_and_near(bits, asym, dtype):
    given = torch.randn(4, 32).to(dtype) + asym * 3
    values = given.clone()
    result = ds_quantizer(values, groups=8, bit_num=bits, asym=asym)
    assert result is values and result.dtype == dtype
    for before, after in zip(given.float().view(8, -1), result.float().view(8, -1), strict=True):
        assert after.unique().numel() <= 2**bits
        step = (before.max() - before.min()) / (2**bits - 1) if asym else 2 * before.abs().max() / 2**bits
        # The greatest positive value has no level of its own around 0, hence a whole step; and the dtype rounds.
        assert (after - before).abs().max() <= step * (0.51 if asym else 1.01) + torch.finfo(dtype).eps * 4


def test_stochastic_rounding_is_right_on_average_and_a_constant_is_kept():
    torch.manual_seed(0)
    mean = torch.stack(
        [ds_quantizer(torch.linspace(-1, 0.7, 16), bit_num=4, sr=True) for _ in range(2000)]
    ).mean(0)
    torch.testing.assert_close(mean, torch.linspace(-1, 0.7, 16), atol=0.01, rtol=0)
    for asym in (False, True):
        assert torch.equal(ds_quantizer(torch.zeros(8), asym=asym), torch.zeros(8))
    torch.testing.assert_close(ds_quantizer(torch.full((8,), 1.5), asym=True), torch.full((8,), 1.5))


@pytest.mark.parametrize("options, words", [({"groups": 3}, "groups=3"), ({"bit_num": 0}, "bit_num=0")])
def test_groups_and_bits_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ds_quantizer(torch.ones(8), **options)


def test_biases_of_convolutions_are_added_and_the_format_stays():
    given, other = (torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last) for _ in range(2))
    bias, other_bias = torch.randn(8), torch.randn(8)
    assert torch.equal(nhwc_bias_add(given, bias), given + bias[:, None, None])
    assert torch.equal(nhwc_bias_add(given, bias, other), given + bias[:, None, None] + other)
    expected = given + bias[:, None, None] + (other + other_bias[:, None, None])
    result = nhwc_bias_add(given, bias, other, other_bias)
    assert torch.equal(result, expected) and result.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="other_bias"):
        nhwc_bias_add(given, bias, other_bias=other_bias)


@pytest.mark.parametrize("trans_b", [False, True])
def test_groups_of_rows_meet_their_matrix(trans_b):
    rows = torch.randn(9, 5, requires_grad=True)
    matrices = torch.randn(3, 6, 5) if trans_b else torch.randn(3, 5, 6)
    matrices.requires_grad_()
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    found = group_gemm_triton(rows, matrices, ends, trans_b)
    expected = torch.zeros(9, 6)
    for first, last, matrix in ((0, 2, matrices[0]), (2, 7, matrices[2])):
        expected[first:last] = rows[first:last] @ (matrix.T if trans_b else matrix)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(result.square().sum(), (rows, matrices)) for result in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="one end for each group"):
        group_gemm_triton(rows, matrices, ends[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_is_applied_with_gradients(dtype):
    gate, up = (torch.randn(3, 7, dtype=dtype, requires_grad=True) for _ in range(2))
    result = swiglu(gate, up)
    assert result.dtype == dtype
    torch.testing.assert_close(result, (F.silu(gate.float()) * up.float()).to(dtype))
    result.sum().backward()
    assert gate.grad is not None and up.grad is not None
    with pytest.raises(ValueError, match="same shape"):
        swiglu(gate, up[:, :3])


def test_an_op_over_lists_is_called_with_its_chunk_size():
    lists = [[torch.ones(2)], [torch.ones(2)]]
    found = MultiTensorApply(2048)(lambda *given: given, torch.zeros(1), lists, 0.5)
    assert found[0] == 2048 and found[2] is lists and found[3] == 0.5
