"""Documented operations that run in PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from deepspeed.ops.adam.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from deepspeed.ops.op_builder import PinMemoryBuilder, SpatialInferenceBuilder
from deepspeed.ops.transformer.inference.bias_add import nhwc_bias_add
from deepspeed.ops.triton_ops.group_gemm_triton import group_gemm_triton
from deepspeed.ops.triton_ops.swiglu_triton import swiglu


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


def test_the_op_of_spatial_inference_adds_biases():
    op = SpatialInferenceBuilder().load()
    given, other = (torch.randn(2, 8, 3, 5).half() for _ in range(2))
    bias, other_bias = torch.randn(8).half(), torch.randn(8).half()
    wide = given + bias[:, None, None]
    assert torch.equal(op.nhwc_bias_add(given, bias), wide)
    assert torch.equal(op.nhwc_bias_add_add(given, bias, other), wide + other)
    expected = wide + (other + other_bias[:, None, None])
    assert torch.equal(op.nhwc_bias_add_bias_add(given, bias, other, other_bias), expected)
    rows = [each.flatten(2).transpose(1, 2) for each in (given, other)]  # [batch, positions, channels]
    found = op.nhwc_bias_add_bias_add(rows[0], bias, rows[1], other_bias)
    assert torch.equal(found, expected.flatten(2).transpose(1, 2))


def test_the_op_of_pinned_memory_gives_out_locked_tensors():
    handle = PinMemoryBuilder().load().pin_handle()
    made = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.bfloat16))
    assert made.shape == (1000,) and made.dtype == torch.bfloat16
    assert handle.is_pinned(made) and handle.is_pinned(made[10:]) and not handle.is_pinned(torch.ones(1000))
    assert handle.free_cpu_locked_tensor(made) and not handle.free_cpu_locked_tensor(made)
    with pytest.raises(ValueError, match="num_elem = -1"):
        handle.new_cpu_locked_tensor(-1, made)


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
    with pytest.raises(ValueError, match="one end offset per group"):
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
    with pytest.raises(
        ValueError, match=r"the same shape and dtype, not gate torch\.\w+ .*, up torch\.float64"
    ):
        swiglu(gate, up.double())


def test_an_op_over_lists_is_called_with_its_chunk_size():
    lists = [[torch.ones(2)], [torch.ones(2)]]
    found = MultiTensorApply(2048)(lambda *given: given, torch.zeros(1), lists, 0.5)
    assert found[0] == 2048 and found[2] is lists and found[3] == 0.5
    assert multi_tensor_applier.chunk_size == 1 << 16
