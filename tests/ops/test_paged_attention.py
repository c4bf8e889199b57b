"""The host kernel for attention over a paged cache against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.inference.cache.pages import LayerShape, PagedCache, PagePiece
from deepspeed.inference.model.attention import AttentionTerms, PackedBatch, paged_attention
from deepspeed.ops import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library")

PIECES = [
    PagePiece([0], 0, (4,)),  # (blocks are of four tokens)
    PagePiece([0], 18, (7, 2, 9, 0, 5)),
    PagePiece([0] * 3, 6, (1, 8, 3)),
    PagePiece([0] * 12, 9, (10, 6, 11, 12, 13, 14)),  # by torch in both
]
TOKENS = sum(piece.count for piece in PIECES)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"heads": 6, "kv_heads": 2},
    "many heads to one": {"heads": 37, "kv_heads": 1},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0, "heads": 4, "kv_heads": 2},
    "sinks": {"sinks": True, "window": 7},
    "sizes": {"key_size": 40, "value_size": 23},
    "bf16": {"dtype": torch.bfloat16, "heads": 4, "kv_heads": 2},
    "fp16": {"dtype": torch.float16},
    "blocks of 16": {"block_size": 16, "heads": 6, "kv_heads": 2},
    "blocks of 20": {"block_size": 20, "window": 15, "dtype": torch.bfloat16},
}


def run(
    by_kernel: bool,
    heads: int = 4,
    kv_heads: int = 4,
    key_size: int = 16,
    value_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    block_size: int = 4,
    poisoned: bool = False,
) -> tuple[torch.Tensor, PagedCache]:
    numbers = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=numbers).to(dtype)  # noqa: E731
    shape = LayerShape(kv_heads, key_size, value_size, dtype, torch.device("cpu"))
    cache = PagedCache({0: shape}, 16, block_size)
    for pages in cache.pages(0):
        pages.copy_(draw(*pages.shape))
    if poisoned:
        poison(cache, block_size)
    query, key = draw(TOKENS, heads, key_size).transpose(0, 1), draw(kv_heads, TOKENS, key_size)
    value = draw(TOKENS, kv_heads, value_size).transpose(0, 1)
    terms = AttentionTerms(0.3, window, softcap, draw(heads) if sinks else None)
    cache.is_on_host = by_kernel
    batch = PackedBatch(PIECES, cache, torch.device("cpu"))
    assert batch.by_kernel == [by_kernel] * 3 + [False]
    return paged_attention(query, key, value, batch, 0, terms), cache


def poison(cache: PagedCache, block_size: int) -> None:
    """NaN wherever no sequence has a token yet: [blocks, heads, size, tokens] of keys, [.., tokens, size] of values."""
    keys, values = cache.pages(0)
    unused = torch.ones(len(keys), block_size, dtype=torch.bool)
    for piece in PIECES:
        for position in range(piece.start):
            unused[piece.blocks[position // block_size], position % block_size] = False
    keys.masked_fill_(unused[:, None, None, :], torch.nan)
    values.masked_fill_(unused[:, None, :, None], torch.nan)


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_reads_nothing_that_is_not_written(case: str) -> None:
    expected, _ = run(True, **CASES[case])
    assert torch.equal(run(True, **CASES[case], poisoned=True)[0], expected)


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_computes_what_torch_does(case: str) -> None:
    settings = CASES[case]
    found, cache = run(True, **settings)
    wanted, expected = run(False, **settings)
    error = 1e-5 if settings.get("dtype", torch.float32) is torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, rtol=error, atol=error)
    for pages, other in zip(cache.pages(0), expected.pages(0), strict=True):
        assert torch.equal(pages, other)


@pytest.mark.parametrize(
    "case", ["grouped", "sinks", "sizes", "bf16", "fp16", "blocks of 16", "blocks of 20"]
)
def test_all_instruction_sets_give_the_same_bits(case: str) -> None:
    lib: Any = native.library()
    best = lib.ds_isa()
    try:
        found = []
        for isa in range(best + 1):
            lib.ds_set_isa(isa)
            found.append(run(True, **CASES[case])[0])
    finally:
        lib.ds_set_isa(best)
    assert all(torch.equal(each, found[-1]) for each in found)


@pytest.mark.parametrize("window", [None, 9])
def test_a_token_has_the_same_bits_in_every_piece(window: int | None) -> None:
    """Long enough for several groups of blocks, which a window begins to see in their middle."""
    numbers = torch.Generator().manual_seed(2)
    made = PagedCache({0: LayerShape(2, 16, 16, torch.float32, torch.device("cpu"))}, 16, 4)
    for pages in made.pages(0):
        pages.copy_(torch.randn(pages.shape, generator=numbers))
    query, key, value = (torch.randn(heads, 8, 16, generator=numbers) for heads in (4, 2, 2))
    found = []
    for count in (1, 4, 8):
        outputs = []
        for first in range(0, 8, count):
            part = slice(first, first + count)
            batch = PackedBatch(
                [PagePiece([0] * count, 37 + first, tuple(range(12)))], made, torch.device("cpu")
            )
            assert batch.by_kernel == [True]
            given = (query[:, part], key[:, part], value[:, part])
            outputs.append(paged_attention(*given, batch, 0, AttentionTerms(0.3, window)))
        found.append(torch.cat(outputs))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_scores_of_any_size() -> None:
    """Far apart and far from zero."""
    cache = PagedCache({0: LayerShape(1, 4, 4, torch.float32, torch.device("cpu"))}, 16, 4)
    keys, values = cache.pages(0)
    keys.copy_(torch.randn(keys.shape, generator=torch.Generator().manual_seed(1)) * 300)
    values.copy_(torch.arange(values.numel()).view(values.shape))
    new = torch.full((1, 1, 4), 10.0)
    for by_kernel in (True, False):
        cache.is_on_host = by_kernel
        batch = PackedBatch([PagePiece([0], 14, (3, 1, 2, 0))], cache, torch.device("cpu"))
        out = paged_attention(new, new, new, batch, 0, AttentionTerms(1.0))
        if by_kernel:
            found = out
    torch.testing.assert_close(found, out)
