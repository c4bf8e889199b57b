"""The host's kernel for block-sparse attention against dense attention with a mask in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deepspeed.ops import native
from deepspeed.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
    host_attention,
)
from deepspeed.ops.sparse_attention import block_attention as module
from deepspeed.ops.sparse_attention.block_attention import LayoutPlan, Masks, block_attention
from tests.allocations import counted

pytestmark = pytest.mark.skipif(native.library() is None, reason="built without native kernels")

BATCH, HEADS, TOKENS = 2, 4, 192
CONFIGS: list[SparsityConfig] = [
    FixedSparsityConfig(
        HEADS, different_layout_per_head=True, num_different_global_patterns=4, attention="unidirectional"
    ),
    VariableSparsityConfig(HEADS, num_random_blocks=2, different_layout_per_head=True),
    BigBirdSparsityConfig(HEADS, block=32),
    BSLongformerSparsityConfig(HEADS, block=48),
    LocalSlidingWindowSparsityConfig(HEADS),
]
IDS = [type(config).__name__ for config in CONFIGS]


@pytest.fixture(autouse=True)
def host_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing here may go by way of the scores."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "_by_scores", None)
    yield


def tensors(size: int, dtype: torch.dtype, tokens: int = TOKENS) -> list[Tensor]:
    return [torch.randn(BATCH, HEADS, tokens, size).to(dtype).requires_grad_() for _ in range(3)]


def expected(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor, scale: float) -> Tensor:
    scores = (q @ k.mT * scale + bias).masked_fill(~seen, -math.inf)
    blind = ~torch.isfinite(scores).any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    return weights @ v


def check(layout: Tensor, block: int, size: int, dtype: torch.dtype, masks: Masks, tolerance: float) -> None:
    tokens = layout.shape[1] * block
    inputs = tensors(size, dtype, tokens)
    scale = size**-0.5
    out = block_attention(*inputs, LayoutPlan(layout, block), masks, scale)
    grad = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, inputs, grad)]

    wide = [x.detach().double().requires_grad_() for x in inputs]
    seen = layout.bool().repeat_interleave(block, 1).repeat_interleave(block, 2).unsqueeze(0)
    if masks.causal:
        seen = seen & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    bias = torch.zeros(BATCH, 1, tokens, tokens, dtype=torch.float64)
    if masks.keys is not None:
        bias = bias + masks.keys.double()[:, None, None, :]
    if masks.scores is not None:
        bias = bias + masks.scores.double()
    oracle = expected(*wide, seen, bias, scale)
    exact = [oracle, *torch.autograd.grad(oracle, wide, grad.double())]
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype is dtype
        error = (mine.detach().double() - theirs.detach()).abs().max()
        assert error <= tolerance * theirs.detach().abs().max()


def some_masks(name: str, tokens: int) -> Masks:
    hidden = torch.rand(BATCH, tokens) < 0.3
    padding = torch.zeros(BATCH, tokens).masked_fill_(hidden, -math.inf)
    scores = torch.randn(tokens, tokens).masked_fill_(torch.rand(tokens, tokens) < 0.1, -math.inf)
    return {
        "none": Masks(),
        "causal": Masks(causal=True),
        "padding": Masks(keys=padding, causal=True),
        "scores": Masks(scores=scores, keys=padding),
    }[name]


@pytest.mark.parametrize("masks", ["none", "causal", "padding", "scores"])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_values_and_gradients(config: SparsityConfig, masks: str) -> None:
    layout = config.make_layout(TOKENS)
    check(layout, config.block, 32, torch.float32, some_masks(masks, TOKENS), 3e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
def test_16_bits_and_sizes_of_heads(size: int, dtype: torch.dtype, tolerance: float) -> None:
    layout = torch.randint(0, 2, (HEADS, 6, 6))
    layout[1, 2] = 0  # a row, and a column, without blocks
    layout[2, :, 1] = 0
    check(layout, 16, size, dtype, Masks(causal=True), tolerance)
    check(layout, 16, size, torch.float32, Masks(), 3e-6)


def test_more_blocks_in_a_row_than_are_computed_together() -> None:
    check(torch.ones(HEADS, 40, 40), 16, 16, torch.float32, Masks(), 3e-6)


@pytest.mark.parametrize("masks", ["causal", "scores"])
def test_the_same_bits_from_any_instruction_set_and_number_of_threads(masks: str) -> None:
    lib = native.library()
    assert lib is not None
    best, threads = lib.ds_isa(), torch.get_num_threads()
    plan = LayoutPlan(CONFIGS[0].make_layout(TOKENS), 16)
    inputs, results = tensors(64, torch.float32), []
    grad, given = torch.randn_like(inputs[0]), some_masks(masks, TOKENS)
    try:
        for isa, count in [*((isa, 1) for isa in range(best + 1)), (best, 2), (best, 3)]:
            assert lib.ds_set_isa(isa) == isa
            torch.set_num_threads(count)
            out = block_attention(*inputs, plan, given, 0.125)
            results.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    finally:
        lib.ds_set_isa(best)
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("heads", [1, 8])
def test_memory_is_linear_in_the_tokens(heads: int) -> None:
    """Memory of forward and backward in addition to inputs and gradients, for a pattern with equal blocks per row."""
    peaks = {}
    for tokens in (1024, 2048, 4096):
        config = LocalSlidingWindowSparsityConfig(heads, 16, num_sliding_window_blocks=3)
        attention = SparseSelfAttention(config, max_seq_length=tokens)
        inputs = [torch.randn(1, heads, tokens, 32, requires_grad=True) for _ in range(3)]
        attention.plan(heads, tokens)
        with counted() as memory:
            torch.autograd.grad(attention(*inputs).sum(), inputs)
        peaks[tokens] = memory.peak
    assert peaks[4096] < 2.05 * peaks[2048] < 4.2 * peaks[1024]
    size = heads * 4096 * 32 * 4  # of one tensor like the queries
    # Output, its gradient, and those of query, key and value; of a head alone the last two are summed in 8 parts.
    copies = 5 + (2 * 8 if heads == 1 else 0)
    assert peaks[4096] < (copies + 0.5) * size


def test_gradients_of_16_bits_need_sums_of_one_head_per_thread() -> None:
    config = LocalSlidingWindowSparsityConfig(8, 16, num_sliding_window_blocks=3)
    attention = SparseSelfAttention(config, max_seq_length=1024)
    inputs = [torch.randn(1, 8, 1024, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    attention.plan(8, 1024)
    with counted() as memory:
        torch.autograd.grad(attention(*inputs).sum(), inputs)
    size = 8 * 1024 * 32  # of one tensor like the queries, in elements
    assert memory.peak < 5.5 * size * 2 + torch.get_num_threads() * 2 * size / 8 * 4


def test_a_layout_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    class Counted(host_attention.RowLists):
        def __init__(self, layout: Tensor, layout_of: list[int]) -> None:
            made.append(layout)
            super().__init__(layout, layout_of)

    monkeypatch.setattr(module, "RowLists", Counted)
    attention = SparseSelfAttention(FixedSparsityConfig(HEADS), max_seq_length=TOKENS)
    for tokens in (TOKENS, TOKENS, 64, 64, TOKENS):
        attention(*tensors(16, torch.float32, tokens)).sum().backward()
    assert [layout.shape[1] for layout in made] == [TOKENS // 16, 64 // 16]


def test_16384_tokens_train_in_a_fiftieth_of_the_memory_of_their_scores() -> None:
    tokens, heads = 16384, 8
    attention = SparseSelfAttention(BSLongformerSparsityConfig(heads), max_seq_length=tokens)
    weight = torch.randn(3, 16, 16, requires_grad=True)
    x = torch.randn(1, heads, tokens, 16)
    attention.plan(heads, tokens)
    with counted() as memory:
        attention(*(x @ each for each in weight)).square().mean().backward()
    assert weight.grad is not None and torch.isfinite(weight.grad).all() and weight.grad.abs().max() > 0
    assert memory.peak < heads * tokens**2 * 4 / 50
