"""Attention over the paged cache: by a kernel where one exists, else in plain torch, the reference for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.inference.cache.pages import PagedCache, PagePiece
from deepspeed.ops import paged_attention as host

_KERNEL_TOKENS = 8
"""Most tokens of a piece for the kernel. Torch computes longer ones: gathering keys is cheap next to the products."""


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """Attention parameters of a layer.

    ``window``: a token attends to itself and the ``window - 1`` before it; None: to all before it. ``softcap``: scores
    s become softcap * tanh(s / softcap). ``sinks`` [heads]: extra softmax scores without a value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def for_kernel(self) -> dict[str, Any]:
        """Return the keyword arguments of the host and GPU kernels."""
        return {
            "scale": self.scale,
            "window": self.window or 0,
            "softcap": self.softcap or 0.0,
            "sinks": self.sinks,
        }


class PackedBatch:
    """Pieces of several sequences packed one after another, as the layers of one forward need them.

    Attributes:
        tokens, positions: [1, tokens].
        blocks, offsets: [tokens], destination of each token's key and value.
        last: indices of the tokens whose logits are wanted.
        kernel: the pieces for the host kernel; None: the cache is not on the host.
        by_kernel: per piece, whether the host kernel computes it.
        gpu_pieces: `PagedPieces` of `ops/gpu/paged_attention.py`, which then computes all; None: the cache is not on a
            GPU.
    """

    def __init__(self, pieces: Sequence[PagePiece], cache: PagedCache, device: torch.device) -> None:
        self.pieces, self.cache, self.device = pieces, cache, device
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        size = cache.block_size
        tokens = [token for piece in pieces for token in piece.tokens]
        positions = [at for piece in pieces for at in range(piece.start, piece.stop)]
        blocks = [piece.blocks[at // size] for piece in pieces for at in range(piece.start, piece.stop)]
        wanted, end = [], 0
        for piece in pieces:
            end += piece.count
            wanted += range(end - piece.wanted, end)
        made = torch.tensor([tokens, positions, blocks], dtype=torch.long).to(device)
        self.tokens, self.positions, self.blocks = made[0:1], made[1:2], made[2]
        self.offsets = self.positions[0] % size
        self.last = torch.tensor(wanted, device=device)

        native = cache.is_on_host
        self.by_kernel = [native and piece.count <= _KERNEL_TOKENS for piece in pieces]
        described = [(piece.blocks, piece.start, piece.count) for piece in pieces]
        self.kernel = host.PagedPieces(described, self.by_kernel) if native else None
        self.gpu_pieces: Any = None
        if cache.is_on_gpu:
            from deepspeed.ops.gpu.paged_attention import PagedPieces

            self.gpu_pieces = PagedPieces(described, device)

    @cached_property
    def tables(self) -> list[Tensor]:
        """Block table [blocks] of each piece."""
        return [torch.tensor(piece.blocks, device=self.device) for piece in self.pieces]

    def mask(self, piece: int, window: int | None) -> Tensor | None:
        """Return the attention mask of a piece: bool [tokens, keys], keys counted from ``first_key``, True: attended;
        None: all are."""
        known = (piece, window)
        if known not in self._masks:
            self._masks[known] = self._mask(self.pieces[piece], window)
        return self._masks[known]

    def _mask(self, piece: PagePiece, window: int | None) -> Tensor | None:
        if piece.count == 1:
            return None
        query = torch.arange(piece.start, piece.stop, device=self.device)[:, None]
        key = torch.arange(first_key(piece, window), piece.stop, device=self.device)
        seen = key <= query
        return seen if window is None else seen & (key > query - window)


def first_key(piece: PagePiece, window: int | None) -> int:
    """Return the first position that any token of the piece attends to."""
    return 0 if window is None else max(0, piece.start - window + 1)


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: PackedBatch,
    layer: int,
    terms: AttentionTerms,
    *,
    stored: bool = False,
) -> Tensor:
    """Attend from each piece's queries [heads, tokens, size] to all keys and values of its sequence, after storing the
    tokens' keys and values [kv heads, tokens, size] unless ``stored``. Returns [tokens, heads, value size]."""
    if batch.kernel is not None:
        output = host.paged_attention(
            query, key, value, batch.cache.pages(layer), batch.kernel, **terms.for_kernel()
        )
    else:
        if not stored:
            batch.cache.write(layer, batch.blocks, batch.offsets, key.transpose(0, 1), value.transpose(0, 1))
        if batch.gpu_pieces is not None:
            from deepspeed.ops.gpu import paged_attention as gpu

            return gpu.paged_attention(
                query, batch.cache.pages(layer), batch.gpu_pieces, **terms.for_kernel()
            )
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
    start = 0
    for index, piece in enumerate(batch.pieces):
        stop = start + piece.count
        if not batch.by_kernel[index]:
            first = first_key(piece, terms.window)
            known = batch.cache.read(layer, batch.tables[index], first, piece.stop)
            mask = batch.mask(index, terms.window)
            output[start:stop] = attend(query[:, start:stop], *known, mask, terms).transpose(0, 1)
        start = stop
    return output


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, terms: AttentionTerms) -> Tensor:
    """Attend [heads, n, size] to [kv heads, m, size] -> [heads, n, value size]. ``mask``: bool [n, m], True: seen."""
    heads, count = query.shape[0], query.shape[1]
    kv_heads = key.shape[0]
    # Query heads that share keys become extra rows of one product, so keys and values are not repeated.
    query = query.reshape(kv_heads, heads // kv_heads * count, query.shape[2])
    if mask is not None and heads != kv_heads:
        mask = mask.repeat(heads // kv_heads, 1)
    if terms.softcap is None and terms.sinks is None:
        out = functional.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=terms.scale
        )[0]
    else:
        out = _by_scores(query, key, value, mask, terms, count)
    return out.reshape(heads, count, value.shape[2])


def _by_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, terms: AttentionTerms, count: int
) -> Tensor:
    scores = (query @ key.transpose(1, 2)).float() * terms.scale
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if terms.sinks is not None:
        sinks = terms.sinks.float().reshape(scores.shape[0], -1, 1).repeat_interleave(count, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)
    if terms.sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value
