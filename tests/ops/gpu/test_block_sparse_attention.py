"""Triton kernels for block-sparse attention against dense attention in fp64, with all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.ops.gpu import usable
from deepspeed.ops.sparse_attention import SparseSelfAttention
from deepspeed.ops.sparse_attention import block_attention as module
from deepspeed.ops.sparse_attention.block_attention import (
    LayoutPlan,
    Masks,
    block_attention,
    fits_gpu,
    gpu_attention,
)
from deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig
from tests.ops.gpu.attention_cases import attention, built_everywhere, close, drawn
from tests.ops.gpu.triton_kit import built, compiling, interpreted

NAMES = {"_forward", "_query_gradient", "_key_gradients"}


def layout(heads: int, blocks: int, alike: bool = False) -> Tensor:
    """A diagonal, some random blocks, and an empty row and column; of each head or of all."""
    found = torch.rand(1 if alike else heads, blocks, blocks) < 0.4
    found |= torch.eye(blocks, dtype=torch.bool)
    found[0, 1], found[-1, :, 2] = False, False
    return found.expand(heads, blocks, blocks).long()


def dense(of: Tensor, block: int, causal: bool = False) -> Tensor:
    """A layout as what is added to the scores."""
    seen = of.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)
    seen = seen.tril() if causal else seen
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)


def gradients(out: Tensor, of: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, of, grad.to(out.dtype))


def compare(
    block: int = 16,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
    keys: bool = False,
    scores: bool = False,
    positions: tuple[int, int] | None = None,
    alike: bool = False,
    blocks: int = 4,
    hidden: bool = False,
) -> None:
    batch, heads, tokens = 2, 3, blocks * block
    of = layout(heads, blocks, alike)
    inputs = [drawn(batch, heads, tokens, size, dtype=dtype) for _ in range(3)]
    bias = dense(of, block, causal)
    of_keys = of_scores = of_positions = None
    if keys:
        of_keys = torch.randn(batch, tokens, dtype=dtype)
        of_keys[0, 0 if hidden else tokens // 2 :] = -torch.inf
        bias = bias + of_keys.double()[:, None, None]
    if scores:
        of_scores = torch.randn(tokens, tokens, dtype=dtype).masked_fill(
            torch.rand(tokens, tokens) < 0.2, -torch.inf
        )
        bias = bias + of_scores.double()
    if positions is not None:
        of_positions = drawn(*positions, tokens, tokens, dtype=dtype)
        bias = bias + of_positions.double()
        inputs.append(of_positions)
    plan = LayoutPlan(of, block)
    scale = size**-0.5
    assert fits_gpu(*inputs[:3])
    masks = Masks(of_keys, of_scores, causal, of_positions)
    found = gpu_attention(*inputs[:3], plan, masks, scale)
    expected = attention(*inputs[:3], bias, scale)
    close(found, expected, dtype, "output")
    grad = torch.randn(expected.shape)
    names = ("query", "key", "value", "positions")
    for name, one, other in zip(
        names, gradients(found, inputs, grad), gradients(expected, inputs, grad.to(dtype)), strict=False
    ):
        close(one, other, dtype, name)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "odd head size": {"size": 20, "alike": True},
    "large blocks": {"block": 40, "blocks": 3, "causal": True},
    "small blocks": {"block": 8, "blocks": 5},
    "blocks of one token": {"block": 1, "blocks": 9, "causal": True},
    "many blocks": {"blocks": 7},
    "the widest heads": {"size": 256, "blocks": 3},
    "key padding": {"keys": True},
    "a sequence that sees nothing": {"keys": True, "hidden": True, "positions": (1, 1)},
    "all masks": {"keys": True, "scores": True, "causal": True},
    "positions": {"positions": (1, 1)},
    "positions of heads": {"positions": (1, 3), "alike": True, "keys": True},
    "positions of sequences": {"positions": (2, 3), "size": 24},
    "bf16": {"dtype": torch.bfloat16, "scores": True, "positions": (2, 1)},
    "fp16": {"dtype": torch.float16, "keys": True, "positions": (1, 3)},
}


@pytest.mark.parametrize("case", CASES)
@interpreted
def test_values_and_gradients(case: str) -> None:
    compare(**CASES[case])


@interpreted
def test_the_module_in_both_modes_of_its_masks() -> None:
    """Like the module without a GPU, which is tested against dense attention separately."""
    from unittest import mock

    self_attention = SparseSelfAttention(
        FixedSparsityConfig(2, block=16, num_local_blocks=2),
        attn_mask_mode="mul",
        key_padding_mask_mode="mul",
    )
    tokens = 64
    q, k, v = (drawn(2, 2, tokens, 16) for _ in range(3))
    rpe = drawn(2, tokens, tokens)
    padding, mask = torch.ones(2, tokens), (torch.rand(tokens, tokens) < 0.8).float()
    padding[1, 40:] = 0
    for modes in ("mul", "add"):
        self_attention.key_padding_mask_mode = self_attention.attn_mask_mode = modes
        for given in ({}, {"rpe": rpe}):
            expected = self_attention(q, k, v, key_padding_mask=padding, attn_mask=mask, **given)
            of = [q, k, v, *given.values()]
            wanted = torch.autograd.grad(expected.square().sum(), of)
            with mock.patch.object(module, "usable", lambda *_: True):
                found = self_attention(q, k, v, key_padding_mask=padding, attn_mask=mask, **given)
                assert "BlockSparseAttention" in type(found.grad_fn).__name__
            close(found, expected, torch.float32)
            for one, other in zip(torch.autograd.grad(found.square().sum(), of), wanted, strict=True):
                close(one, other, torch.float32)


@interpreted
def test_a_layout_is_compiled_once() -> None:
    plan = LayoutPlan(layout(2, 4), 16)
    q = drawn(1, 2, 64, 16)
    for _ in range(2):
        gpu_attention(q, q, q, plan, Masks(), 1.0)
    assert list(plan._on_gpus) == [(torch.device("cpu"), False)]
    made = plan.on_gpu(torch.device("cpu"), causal=False)
    assert len(made.rows.columns) == len(made.columns.columns) <= plan.blocks


def launch(dtype: torch.dtype, block: int, size: int, masks: bool) -> None:
    q = drawn(2, 2, 2 * block, size, dtype=dtype)
    tokens, planes = 2 * block, 2 if block == 64 else 1  # each of a sequence and head, or all share one
    positions = drawn(planes, planes, tokens, tokens, dtype=dtype) if masks else None
    keys = torch.zeros(2, tokens, dtype=dtype) if masks else None
    scores = torch.zeros(tokens, tokens, dtype=dtype) if masks else None
    of_masks = Masks(keys, scores, masks, positions)
    out = gpu_attention(q, q, q, LayoutPlan(torch.ones(2, 2, 2), block), of_masks, 1.0)
    out.sum().backward()


@pytest.mark.parametrize("masks", [False, True])
@compiling
def test_kernels_compile(masks: bool) -> None:
    names = NAMES | {"_positions_gradient"} if masks else NAMES
    assert built(lambda: launch(torch.bfloat16, 16, 64, masks)) == names


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 64, 128, 200])
@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@compiling
def test_kernels_compile_for_all_tiles(dtype: torch.dtype, block: int, size: int) -> None:
    names = NAMES | {"_positions_gradient"}
    assert built_everywhere(lambda: launch(dtype, block, size, True)) == names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [16, 64, 128])
def test_on_a_gpu(block: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    of = layout(4, 8)
    inputs = [drawn(2, 4, 8 * block, 64, dtype=dtype) for _ in range(3)]
    expected = attention(*inputs, dense(of, block, True), 0.125)
    on_gpu = [x.detach().cuda().requires_grad_() for x in inputs]
    assert usable(*on_gpu) and fits_gpu(*on_gpu)
    found = block_attention(*on_gpu, LayoutPlan(of, block), Masks(causal=True), 0.125)
    close(found.cpu(), expected, dtype)
    grad = torch.randn(expected.shape).to(dtype)
    for one, other in zip(
        gradients(found, on_gpu, grad.cuda()), gradients(expected, inputs, grad), strict=True
    ):
        close(one.cpu(), other, dtype)
