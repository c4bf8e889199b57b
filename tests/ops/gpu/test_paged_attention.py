"""The Triton kernel for attention over a paged cache against plain torch, and against dense attention in fp64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from deepspeed.inference.cache import pages as cache_pages
from deepspeed.inference.cache.pages import LayerShape, PagedCache, PagePiece
from deepspeed.inference.model.attention import AttentionTerms, PackedBatch, paged_attention
from deepspeed.ops import gpu as gpu_kernels
from tests.ops.gpu.attention_cases import TOLERANCE, attention, built_everywhere, close, drawn
from tests.ops.gpu.triton_kit import built, compiling, interpreted

PIECES = [
    PagePiece([0], 0, (4,)),  # (blocks are of four tokens)
    PagePiece([0], 18, (7, 2, 9, 0, 5)),
    PagePiece([0] * 3, 6, (1, 8, 3)),
    PagePiece([0] * 12, 9, (10, 6, 11, 12, 13, 14)),
]
TOKENS = sum(piece.count for piece in PIECES)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"heads": 6, "kv_heads": 2},
    "many heads to one": {"heads": 37, "kv_heads": 1},
    "more heads than rows": {"heads": 71, "kv_heads": 1},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0, "heads": 4, "kv_heads": 2},
    "sinks": {"sinks": True, "window": 7},
    "sizes": {"key_size": 40, "value_size": 23},
    "bf16": {"dtype": torch.bfloat16, "heads": 4, "kv_heads": 2},
    "fp16": {"dtype": torch.float16},
    "blocks of 20": {"block_size": 20, "window": 15, "dtype": torch.bfloat16},
}


def run(
    on_gpu: bool,
    heads: int = 4,
    kv_heads: int = 4,
    key_size: int = 16,
    value_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    block_size: int = 4,
    device: str = "cpu",
) -> tuple[Tensor, PagedCache]:
    """By the kernel or by torch."""
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(shape).to(device, dtype)  # noqa: E731
    cache = PagedCache(
        {0: LayerShape(kv_heads, key_size, value_size, dtype, torch.device(device))}, 16, block_size
    )
    for pages in cache.pages(0):
        pages.copy_(draw(*pages.shape))
    query, key = draw(TOKENS, heads, key_size).transpose(0, 1), draw(kv_heads, TOKENS, key_size)
    value = draw(TOKENS, kv_heads, value_size).transpose(0, 1)
    terms = AttentionTerms(0.3, window, softcap, draw(heads) if sinks else None)
    cache.is_on_host, cache.is_on_gpu = False, on_gpu
    batch = PackedBatch(PIECES, cache, torch.device(device))
    assert (batch.gpu_pieces is not None) == on_gpu
    return paged_attention(query, key, value, batch, 0, terms), cache


@pytest.mark.parametrize("split", [8, 512])
@pytest.mark.parametrize("case", CASES)
@interpreted
def test_the_kernel_computes_what_torch_does(case: str, split: int) -> None:
    from deepspeed.ops.gpu import paged_attention as gpu

    settings = CASES[case]
    with mock.patch.object(gpu, "SPLIT", split):
        found, cache = run(True, **settings)
    wanted, expected = run(False, **settings)
    close(found, wanted, settings.get("dtype", torch.float32))
    for pages, other in zip(cache.pages(0), expected.pages(0), strict=True):
        assert torch.equal(pages, other)


def decoded(contexts: list[int], slopes: Tensor | None, order: list[int], window: int = 0) -> list[Tensor]:
    """One token of each sequence, in this order in the batch."""
    from deepspeed.ops.gpu import paged_attention as gpu

    torch.manual_seed(0)
    heads, kv_heads, size, block = 4, 2, 16, 8
    longest = -(-max(contexts) // block)
    tables = torch.randperm(longest * len(contexts)).view(len(contexts), -1)
    sizes = ((kv_heads, size, block), (kv_heads, block, size))
    pages = tuple(drawn(tables.numel(), *each, gradient=False) for each in sizes)
    query = torch.randn(heads, len(contexts), size)
    pieces = gpu.PagedPieces([(tables[i].tolist(), contexts[i] - 1, 1) for i in order], torch.device("cpu"))
    out = gpu.paged_attention(query[:, order], pages, pieces, scale=0.2, slopes=slopes, window=window)
    for row, i in enumerate(order):
        of_keys, of_values = (x[tables[i]] for x in pages)
        k = of_keys.permute(1, 0, 3, 2).flatten(1, 2)[:, : contexts[i]].repeat_interleave(2, 0)
        v = of_values.transpose(0, 1).flatten(1, 2)[:, : contexts[i]].repeat_interleave(2, 0)
        distance = torch.arange(contexts[i]) - (contexts[i] - 1)
        bias = torch.zeros(heads, 1, contexts[i], dtype=torch.float64)
        if slopes is not None:
            bias += slopes.double()[:, None, None] * distance
        if window:
            bias[..., distance <= -window] = -torch.inf
        close(out[row], attention(query[:, i : i + 1], k, v, bias, 0.2)[:, 0], torch.float32)
    return [out[order.index(i)] for i in range(len(contexts))]


@pytest.mark.parametrize("window", [0, 20])
@interpreted
def test_long_contexts_in_parts_with_alibi(window: int) -> None:
    """The result of a sequence does not depend on the others: the same bits alone and in any order."""
    from deepspeed.ops.gpu import paged_attention as gpu

    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    with mock.patch.object(gpu, "SPLIT", 16):
        together = decoded([1, 16, 17, 70], slopes, [0, 1, 2, 3], window)
        other = decoded([1, 16, 17, 70], slopes, [3, 1, 0, 2], window)
    assert all(torch.equal(one, two) for one, two in zip(together, other, strict=True))


@interpreted
def test_work_is_divided_once_and_within_what_is_seen() -> None:
    from deepspeed.ops.gpu import paged_attention as gpu

    pieces = gpu.PagedPieces([(range(400), 3000, 1), (range(40), 100, 200)], torch.device("cpu"))
    few, many = pieces.work(700, 4)
    assert pieces.work(700, 4)[0] is few
    assert few.items[:, 2:4].tolist() == [[2301, 2560], [2560, 3001]] and few.parts == 2
    assert few.joins.tolist() == [[0, 0, 0, 2]] and few.items[:, 5].tolist() == [1, 0]
    tokens, keys = many.items[:, 1].tolist(), many.items[:, 2:4].tolist()
    assert (
        tokens == list(range(0, 200, 16)) and keys[0] == [0, 116] and keys[-1] == [0, 300] and many.parts == 0
    )


@interpreted
def test_what_lies_behind_a_sequence_does_not_matter() -> None:
    """Blocks are reused: the contents of their last tokens, and of free blocks, are arbitrary."""
    cache = PagedCache({0: LayerShape(2, 16, 16, torch.float32, torch.device("cpu"))}, 8, 16)
    drawn_pages = [torch.randn(pages.shape) for pages in cache.pages(0)]
    query, new = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    piece, found = PagePiece([0] * 3, 18, (5, 2, 6)), []
    cache.is_on_host, cache.is_on_gpu = False, True
    for garbage in (0.0, torch.nan, torch.inf):
        for pages, drawn_before in zip(cache.pages(0), drawn_pages, strict=True):
            pages.fill_(garbage)
            pages[5] = drawn_before[5]
        cache.pages(0)[0][2, :, :, :2], cache.pages(0)[1][2, :, :2] = 1.0, 1.0
        batch = PackedBatch([piece], cache, torch.device("cpu"))
        found.append(paged_attention(query, new, new, batch, 0, AttentionTerms(0.3)))
    assert found[0].isfinite().all()
    assert all(torch.equal(found[0], other) for other in found[1:])


@interpreted
def test_many_heads_that_share_keys_take_parts() -> None:
    """A single token has few programs, however many heads it has; a chunk of a prompt has many."""
    from deepspeed.ops.gpu import paged_attention as gpu

    pieces = gpu.PagedPieces([(range(40), 1300, 1), (range(40), 1100, 2)], torch.device("cpu"))
    (many,) = pieces.work(0, 40)
    assert many.rows == 64 and many.parts == 3
    assert many.items[:, [0, 1, 2, 3, 4]].tolist() == [
        [0, 0, 0, 512, 0],
        [0, 0, 512, 1024, 1],
        [0, 0, 1024, 1301, 2],
        [1, 0, 0, 1101, -1],
        [1, 1, 0, 1102, -1],
    ]


@interpreted
def test_scores_of_any_size() -> None:
    """Far apart and far from zero."""
    cache = PagedCache({0: LayerShape(1, 4, 4, torch.float32, torch.device("cpu"))}, 16, 4)
    keys, values = cache.pages(0)
    keys.copy_(torch.randn(keys.shape) * 300)
    values.copy_(torch.arange(values.numel()).view(values.shape))
    new = torch.full((1, 1, 4), 10.0)
    found = []
    cache.is_on_host = False
    for cache.is_on_gpu in (True, False):
        batch = PackedBatch([PagePiece([0], 14, (3, 1, 2, 0))], cache, torch.device("cpu"))
        found.append(paged_attention(new, new, new, batch, 0, AttentionTerms(1.0)))
    torch.testing.assert_close(*found)


def test_where_it_is_chosen() -> None:
    """By the place of the pages alone; Triton is not imported for a cache on the host."""
    shape = LayerShape(2, 16, 16, torch.float32, torch.device("cpu"))
    assert not PagedCache({0: shape}, 4, 4).is_on_gpu
    with (
        mock.patch.object(cache_pages, "usable", lambda *_: True),
        mock.patch.object(cache_pages, "_in_kernel", lambda _: True),
    ):
        assert PagedCache({0: shape}, 4, 4).is_on_gpu and not PagedCache({}, 4, 4).is_on_gpu


def test_pages_on_several_devices_stay_with_torch() -> None:
    on_gpus: list[Any] = [SimpleNamespace(is_cuda=True, device=torch.device("cuda", at)) for at in (0, 1)]
    with mock.patch.object(gpu_kernels, "_has_triton", lambda: True):
        assert not gpu_kernels.usable(*on_gpus) and not gpu_kernels.usable(on_gpus[0], torch.empty(1))


@pytest.mark.parametrize("case", ["plain", "window", "softcap", "sinks"])
@compiling
def test_kernels_compile(case: str) -> None:
    from deepspeed.ops.gpu import paged_attention as gpu

    with mock.patch.object(gpu, "SPLIT", 8):
        assert built(lambda: run(True, **{"dtype": torch.bfloat16, **CASES[case]})) == {"_attend", "_join"}


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@compiling
def test_kernels_compile_for_all_tiles(dtype: torch.dtype, size: int, group: int) -> None:
    settings = {
        "heads": 2 * group,
        "kv_heads": 2,
        "key_size": size,
        "value_size": size,
        "dtype": dtype,
        "block_size": 64,
    }
    assert built_everywhere(lambda: run(True, **settings, window=100)) == {"_attend"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str) -> None:
    found, wanted = (run(on_gpu, **CASES[case], device="cuda")[0] for on_gpu in (True, False))
    error = TOLERANCE[CASES[case].get("dtype", torch.float32)]
    torch.testing.assert_close(found, wanted, rtol=error, atol=error)
