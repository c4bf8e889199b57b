"""Block-sparse products, softmax and attention against dense ones with a mask, with gradients in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepspeed.ops.sparse_attention import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    MatMul,
    Softmax,
    SparseAttentionUtils,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
)
from deepspeed.ops.sparse_attention.block_attention import LayoutPlan, Masks, block_attention
from tests.allocations import counted

BATCH, HEADS, BLOCK, SIZE = 2, 4, 16, 8
CONFIGS: list[SparsityConfig] = [
    FixedSparsityConfig(HEADS),
    FixedSparsityConfig(
        HEADS,
        different_layout_per_head=True,
        num_different_global_patterns=4,
        attention="unidirectional",
    ),
    VariableSparsityConfig(HEADS, num_random_blocks=2, different_layout_per_head=True),
    BigBirdSparsityConfig(HEADS, block=32),
    BSLongformerSparsityConfig(HEADS),
    LocalSlidingWindowSparsityConfig(HEADS),
]
IDS = [type(config).__name__ for config in CONFIGS]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def blocks_of(dense: Tensor, layout: Tensor, block: int = BLOCK) -> Tensor:
    """The blocks of a layout in the order of nonzero()."""
    found = [
        dense[:, h, r * block : (r + 1) * block, c * block : (c + 1) * block]
        for h, r, c in layout.nonzero().tolist()
    ]
    return torch.stack(found, dim=1)


def as_mask(layout: Tensor, block: int = BLOCK) -> Tensor:
    return layout.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)


def random_layout(rows: int, columns: int) -> Tensor:
    layout = torch.randint(0, 2, (HEADS, rows, columns))
    layout[1, 2] = 0  # a row, and a column, without blocks
    layout[2, :, 1] = 0
    return layout


def agree(found: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    """Values and gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def masked_softmax(scores: Tensor) -> Tensor:
    """Zeros where a row sees nothing."""
    seen = torch.isfinite(scores).any(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(~seen, 0.0), -1).masked_fill(~seen, 0.0)


def dense(rows: int, columns: int) -> Tensor:
    return torch.randn(BATCH, HEADS, rows, columns, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
def test_products(mode: str, trans_a: bool, trans_b: bool) -> None:
    m, k, n = 5 * BLOCK, 3 * BLOCK, 4 * BLOCK
    a, b = dense(*((k, m) if trans_a else (m, k))), dense(*((n, k) if trans_b else (k, n)))
    stored = {"sdd": (m, n), "dsd": a.shape[-2:], "dds": b.shape[-2:]}[mode]
    layout = random_layout(stored[0] // BLOCK, stored[1] // BLOCK)
    mask = as_mask(layout)
    product = MatMul(layout, BLOCK, mode, trans_a, trans_b)
    left, right = (a * mask if mode == "dsd" else a), (b * mask if mode == "dds" else b)
    expected = (left.mT if trans_a else left) @ (right.mT if trans_b else right)
    if mode == "sdd":
        agree(product(a, b), blocks_of(expected, layout), a, b)
    elif mode == "dsd":
        agree(product(blocks_of(a, layout), b), expected, a, b)
    else:
        agree(product(a, blocks_of(b, layout)), expected, a, b)


def test_products_refuse_what_does_not_fit() -> None:
    layout = random_layout(4, 4)
    with pytest.raises(NotImplementedError, match="mode='ddd'"):
        MatMul(layout, BLOCK, "ddd")
    with pytest.raises(ValueError, match="4 and 64"):
        MatMul(layout, BLOCK, "sdd")(torch.zeros(1, 4, 32, 8), torch.zeros(1, 4, 8, 64))
    with pytest.raises(ValueError, match="block-sparse"):
        MatMul(layout, BLOCK, "dsd")(torch.zeros(1, 3, 16, 16), torch.zeros(1, 4, 64, 8))


@pytest.mark.parametrize("mode", ["add", "mul"])
def test_softmax(mode: str) -> None:
    layout = random_layout(4, 5)
    mask = as_mask(layout)
    x, rpe = dense(4 * BLOCK, 5 * BLOCK), dense(4 * BLOCK, 5 * BLOCK)
    padding = torch.randint(0, 2, (BATCH, 5 * BLOCK)).double()
    attention = torch.randint(0, 2, (4 * BLOCK, 5 * BLOCK)).double()
    attention[:, :BLOCK] = 1
    added = [each if mode == "add" else torch.log(each) for each in (padding[:, None, None], attention)]
    scores = (x * 0.3 + rpe + added[0] + added[1]).masked_fill(~mask, -math.inf)
    expected = masked_softmax(scores)
    softmax = Softmax(layout, BLOCK)
    found = softmax(
        blocks_of(x, layout),
        scale=0.3,
        rpe=rpe,
        key_padding_mask=padding,
        attn_mask=attention,
        key_padding_mask_mode=mode,
        attn_mask_mode=mode,
    )
    agree(found, blocks_of(expected, layout), x, rpe)


def reference(
    q: Tensor, k: Tensor, v: Tensor, layout: Tensor, block: int, added: Tensor | float = 0.0
) -> Tensor:
    mask = as_mask(layout, block)
    scores = (q @ k.mT / math.sqrt(q.shape[-1]) + added).masked_fill(~mask, -math.inf)
    return masked_softmax(scores) @ v


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_self_attention(config: SparsityConfig) -> None:
    length = 256
    attention = SparseSelfAttention(config, max_seq_length=512)
    q, k, v = (dense(length, SIZE) for _ in range(3))
    layout = attention.get_layout(length)
    assert torch.equal(layout, attention.master_layout[:, : length // config.block, : length // config.block])
    agree(attention(q, k, v), reference(q, k, v, layout, config.block), q, k, v)
    agree(attention(q, k.mT.contiguous(), v), reference(q, k, v, layout, config.block), q, k, v)
    assert attention.plan(HEADS, length) is attention.plan(HEADS, length)


def test_self_attention_with_masks_and_relative_positions() -> None:
    length = 192
    attention = SparseSelfAttention(FixedSparsityConfig(HEADS), max_seq_length=length)
    layout = attention.get_layout(length)
    q, k, v = (dense(length, SIZE) for _ in range(3))
    rpe = torch.randn(HEADS, length, length, dtype=torch.float64, requires_grad=True)
    padding = torch.randn(BATCH, 1, 1, length, dtype=torch.float64)
    causal = torch.ones(length, length, dtype=torch.float64).tril()
    added = padding + torch.log(causal)
    expected = reference(q, k, v, layout, BLOCK, added)
    agree(attention(q, k, v, key_padding_mask=padding, attn_mask=causal), expected, q, k, v)
    expected = reference(q, k, v, layout, BLOCK, added + rpe)
    agree(attention(q, k, v, rpe=rpe, key_padding_mask=padding, attn_mask=causal), expected, q, k, v, rpe)


def test_rows_that_see_nothing_give_zeros_and_no_gradient() -> None:
    layout = random_layout(8, 8)
    q, k, v = (dense(8 * BLOCK, SIZE) for _ in range(3))
    padding = torch.zeros(BATCH, 8 * BLOCK, dtype=torch.float64)
    padding[1] = -math.inf
    found = block_attention(q, k, v, LayoutPlan(layout, BLOCK), Masks(keys=padding), 1 / math.sqrt(SIZE))
    assert not found[1].any() and not found[0, 1, 2 * BLOCK : 3 * BLOCK].any()
    agree(found, reference(q, k, v, layout, BLOCK, padding[:, None, None]), q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    config = FixedSparsityConfig(HEADS, attention="unidirectional")
    layout = config.make_layout(1024)
    q, k, v = (torch.randn(1, HEADS, 1024, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    found = block_attention(q, k, v, LayoutPlan(layout, BLOCK), Masks(causal=True), 0.25)
    wide = [each.detach().double().requires_grad_() for each in (q, k, v)]
    causal = torch.log(torch.ones(1024, 1024, dtype=torch.float64).tril())
    expected = reference(*wide, layout, BLOCK, causal)
    assert found.dtype == dtype
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    grad = torch.randn_like(expected)
    mine = torch.autograd.grad(found, (q, k, v), grad.to(dtype))
    for one, other in zip(
        (found, *mine), (expected, *torch.autograd.grad(expected, wide, grad)), strict=True
    ):
        assert (one.double() - other).norm() / other.norm() < bound


def test_memory_grows_with_the_blocks_and_not_with_the_square_of_the_length() -> None:
    config = BSLongformerSparsityConfig(1)
    peaks = []
    for length in (2048, 8192):
        q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
        plan = LayoutPlan(config.make_layout(length), config.block)
        with counted() as memory:
            block_attention(q, k, v, plan, Masks(), 0.25).sum().backward()
        peaks.append(memory.peak)
    assert peaks[1] < 4.5 * peaks[0]
    assert peaks[1] < 8192 * 8192 * 4 / 16


def test_bert_self_attention() -> None:
    class Config:
        hidden_size, num_attention_heads = 32, HEADS

    attention = BertSparseSelfAttention(Config, FixedSparsityConfig(HEADS)).double()
    hidden = torch.randn(BATCH, 128, 32, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(BATCH, 1, 1, 128, dtype=torch.float64)
    mask[:, :, :, 100:] = -10000.0
    q, k, v = (
        attention.transpose_for_scores(part(hidden))
        for part in (attention.query, attention.key, attention.value)
    )
    layout = FixedSparsityConfig(HEADS).make_layout(128)
    expected = reference(q, k, v, layout, BLOCK, mask).transpose(1, 2).flatten(2)
    agree(attention(hidden, mask), expected, hidden)
    with pytest.raises(ValueError, match="num_attention_heads=5"):
        Config.num_attention_heads = 5
        BertSparseSelfAttention(Config)


def test_a_layout_from_a_checkpoint_is_the_one_that_is_used() -> None:
    first, second = (
        SparseSelfAttention(BigBirdSparsityConfig(HEADS, num_random_blocks=4), max_seq_length=512)
        for _ in range(2)
    )
    q, k, v = (torch.randn(1, HEADS, 512, SIZE) for _ in range(3))
    assert not torch.equal(first(q, k, v), second(q, k, v))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(q, k, v), second(q, k, v))


def test_what_is_no_self_attention_is_refused() -> None:
    attention = SparseSelfAttention(FixedSparsityConfig(HEADS))
    q, short = torch.zeros(1, HEADS, 64, SIZE), torch.zeros(1, HEADS, 32, SIZE)
    with pytest.raises(NotImplementedError, match="self-attention"):
        attention(q, q, short)
    with pytest.raises(ValueError, match="not a multiple of block=16"):
        attention(q[:, :, :60], q[:, :, :60], q[:, :, :60])
    with pytest.raises(ValueError, match="num_heads=2"):
        attention(q[:, :2], q[:, :2], q[:, :2])


def test_padding_to_whole_blocks_and_back() -> None:
    ids, mask = torch.ones(2, 20, dtype=torch.long), torch.ones(2, 20, dtype=torch.long)
    table = torch.nn.Embedding(9, 3)
    added, *rest = SparseAttentionUtils.pad_to_block_size(16, ids, mask, mask, None, table(ids), 5, table)
    assert added == 12 and rest[3] is None
    assert [list(each.shape) for each in rest if each is not None] == [[2, 32]] * 3 + [[2, 32, 3]]
    assert rest[0] is not None and (rest[0][:, 20:] == 5).all()
    assert rest[1] is not None and not rest[1][:, 20:].any()
    assert rest[4] is not None and torch.equal(rest[4][0, -1], table.weight[5])
    assert SparseAttentionUtils.unpad_sequence_output(12, torch.zeros(2, 32, 3)).shape == (2, 20, 3)
    assert SparseAttentionUtils.unpad_sequence_output(0, torch.zeros(2, 32, 3)).shape == (2, 32, 3)
    same = SparseAttentionUtils.pad_to_block_size(10, ids, mask, None, None, None, 5, table)
    assert same[0] == 0 and same[1] is ids
