"""Block-sparse attention, forward and backward: the matrix of scores never exists.

On the host (``host_attention.py``) and on GPUs with Triton (``gpu_attention.py``) kernels walk the blocks. Elsewhere,
and for what these do not take, blocks are gathered to tiles; what is gathered at a time is bounded. Backward computes
the weights again from the log-sum-exp, as in T. Dao et al.: FlashAttention: Fast and memory-efficient exact attention
with IO-awareness, 2022. What is kept for it is as large as the queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops.attention_blocks import kernel_for
from deepspeed.ops.sparse_attention import gpu_attention
from deepspeed.ops.sparse_attention.host_attention import HostAttention, runs_here
from deepspeed.ops.sparse_attention.tiles import Pattern, TilePlan, Tiles

_CHUNK = 1 << 19
"""Elements of gathered keys at a time (2 MiB in fp32)."""


@dataclass(frozen=True)
class Masks:
    """Masks added to the scores besides the layout: ``keys`` [batch, columns], ``scores`` [rows, columns] (floats;
    -inf: not seen); ``causal``: no token sees a later one. ``positions`` [1 or batch, 1 or heads, rows, columns]: has a
    gradient; only where ``takes_positions``."""

    keys: Tensor | None = None
    scores: Tensor | None = None
    causal: bool = False
    positions: Tensor | None = None

    def of(self, tiles: Tiles, plan: TilePlan, batch: int) -> Tensor | None:
        """For some tiles of one sequence of the batch: bool or floats [1, tiles, rows or 1, columns]."""
        block, mask = plan.block, None
        if tiles.seen is not None:
            mask = tiles.seen.repeat_interleave(block, 1).repeat_interleave(block, 2)
        if self.causal and not tiles.earlier:
            earlier = _tokens(tiles.rows, block).unsqueeze(2) >= _tokens(tiles.columns, block).unsqueeze(1)
            mask = earlier if mask is None else mask & earlier
        bias = None
        if self.scores is not None:
            squares = self.scores.unflatten(1, (plan.columns, block)).unflatten(0, (plan.rows, block))
            found = squares.transpose(1, 2)[tiles.rows[:, :, None], tiles.columns[:, None, :]]
            bias = found.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if self.keys is not None:
            of_keys = self.keys[batch].view(plan.columns, block)[tiles.columns].flatten(1).unsqueeze(1)
            bias = of_keys if bias is None else bias + of_keys
        if bias is not None and mask is not None:
            bias = (
                bias.masked_fill(~mask, -math.inf)
                if bias.shape == mask.shape
                else torch.where(mask, bias, -math.inf)
            )
        mask = mask if bias is None else bias
        return None if mask is None else mask.unsqueeze(0)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: TilePlan, masks: Masks, scale: float
) -> Tensor:
    """Attention in the blocks of ``plan``: [batch, heads, tokens, head size] in and out, in any floating-point dtype.

    A row that sees nothing gives zeros. Masks have no gradient, but positions.
    """
    if plan.rows == plan.columns and gpu_attention.runs_here(query, key, value):
        return gpu_attention.attention(
            *(query, key, value, plan, masks.keys, masks.scores, masks.positions, masks.causal, scale)
        )
    assert masks.positions is None
    if plan.row_lists.square and runs_here(query, key, value, plan.block):
        lists, block = plan.row_lists, plan.block
        return HostAttention.apply(
            query, key, value, lists, block, masks.keys, masks.scores, masks.causal, scale
        )
    return _BlockAttention.apply(query, key, value, plan.to(query.device), masks, scale)


def takes_positions(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `block_attention` adds positions to the scores of these, of a square layout (else: by way of the
    scores' blocks)."""
    return gpu_attention.runs_here(query, key, value)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: TilePlan, masks: Masks, scale: float
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty(q.shape[:3], dtype=wide, device=q.device)
        for part in _parts(plan, masks, len(q)):
            of_q, of_k, of_v = (part.take(x) for x in (q, k, v))
            of_out = torch.zeros(of_q.shape, dtype=wide, device=q.device)
            of_lse = torch.full((*of_q.shape[:2], 1), -math.inf, dtype=wide, device=q.device)
            for tiles, mask in part.calls(plan, masks, of_k):
                tile_q = _gather(of_q, tiles.rows, plan.block)
                tile_k, tile_v = (_gather(x, tiles.columns, plan.block) for x in (of_k, of_v))
                kernel = kernel_for(tile_q, tile_v, mask)
                tile_out, tile_lse = kernel.forward(tile_q, tile_k, tile_v, mask, scale)
                tile_out, tile_lse = tile_out.to(wide), tile_lse.to(wide).unsqueeze(-1)
                if tiles.joins:
                    old_out, old_lse = (_gather(x, tiles.rows, plan.block) for x in (of_out, of_lse))
                    tile_out, tile_lse = _joined(old_out, old_lse, tile_out, tile_lse)
                _scatter(of_out, tiles.rows, tile_out, plan.block)
                _scatter(of_lse, tiles.rows, tile_lse, plan.block)
            part.put(out, of_out)
            part.put(lse.unsqueeze(-1), of_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.masks, ctx.scale = plan, masks, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        plan, (grad,) = ctx.plan, grads
        wide = torch.promote_types(q.dtype, torch.float32)
        results = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        block = plan.block
        for part in _parts(plan, ctx.masks, len(q)):
            by_row = [part.take(x) for x in (grad, q, out, lse.unsqueeze(-1))]
            of_k, of_v = part.take(k), part.take(v)
            totals = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (by_row[1], of_k, of_v)]
            for tiles, mask in part.calls(plan, ctx.masks, of_k):
                tile_grad, tile_q, tile_out, tile_lse = (_gather(x, tiles.rows, block) for x in by_row)
                tile_k, tile_v = (_gather(x, tiles.columns, block) for x in (of_k, of_v))
                kernel = kernel_for(tile_q, tile_v, mask)
                found = kernel.backward(
                    tile_grad, tile_q, tile_k, tile_v, tile_out, tile_lse.squeeze(-1), mask, ctx.scale
                )
                indices = (tiles.rows, tiles.columns, tiles.columns)
                for total, index, one in zip(totals, indices, found, strict=True):
                    _blocks(total, block).index_add_(1, index.flatten(), _tile_blocks(one.to(wide), block))
            for result, total in zip(results, totals, strict=True):
                part.put(result, total)
        return *results, None, None, None


@dataclass(frozen=True)
class _Part:
    """Sequences of a batch and heads of one pattern: computed together."""

    batch: slice
    pattern: Pattern

    def take(self, x: Tensor) -> Tensor:
        """[sequences x heads, tokens, size] of ``x`` [batch, heads, tokens, size]."""
        own = x[self.batch]
        if self.pattern.heads is not None:
            own = own.index_select(1, self.pattern.heads)
        return own.flatten(0, 1).contiguous()

    def put(self, x: Tensor, own: Tensor) -> None:
        heads = x.shape[1] if self.pattern.heads is None else len(self.pattern.heads)
        own = own.to(x.dtype).unflatten(0, (-1, heads))
        if self.pattern.heads is None:
            x[self.batch] = own
        else:
            x[self.batch].index_copy_(1, self.pattern.heads, own)

    def calls(self, plan: TilePlan, masks: Masks, of_k: Tensor) -> Iterator[tuple[Tiles, Tensor | None]]:
        for tiles in self.pattern.tiles:
            gathered = of_k.shape[0] * tiles.columns.shape[1] * plan.block * of_k.shape[-1]
            for part in tiles.parts(max(1, _CHUNK // max(1, gathered))):
                yield part, masks.of(part, plan, self.batch.start)


def _parts(plan: TilePlan, masks: Masks, batch: int) -> Iterator[_Part]:
    """Sequences with a padding of their own are computed one by one: a mask is as large as the scores of one head."""
    size = 1 if masks.keys is not None else batch
    for start in range(0, batch, size):
        for pattern in plan.patterns:
            yield _Part(slice(start, start + size), pattern)


def _joined(out: Tensor, lse: Tensor, more: Tensor, of_more: Tensor) -> tuple[Tensor, Tensor]:
    """The attention to both of two sets of columns, from that to each. (-inf stands for an empty set.)"""
    together = torch.logaddexp(lse, of_more)
    base = together.masked_fill(together == -math.inf, 0.0)
    return out * torch.exp(lse - base) + more * torch.exp(of_more - base), together


def _gather(x: Tensor, index: Tensor, block: int) -> Tensor:
    """Blocks of [n, tokens, size] as [n, tiles, tokens of a tile, size]."""
    found = _blocks(x, block).index_select(1, index.flatten())
    return found.view(len(x), len(index), index.shape[1] * block, x.shape[-1])


def _scatter(x: Tensor, index: Tensor, tile: Tensor, block: int) -> None:
    _blocks(x, block).index_copy_(1, index.flatten(), _tile_blocks(tile, block))


def _blocks(x: Tensor, block: int) -> Tensor:
    """[n, tokens, size] as [n, blocks, block * size]."""
    return x.view(len(x), x.shape[1] // block, block * x.shape[2])


def _tile_blocks(x: Tensor, block: int) -> Tensor:
    """[n, tiles, tokens of a tile, size] as [n, blocks of all tiles, block * size]."""
    return x.reshape(len(x), x.shape[1] * x.shape[2] // block, block * x.shape[3])


def _tokens(blocks: Tensor, block: int) -> Tensor:
    """[tiles, n] block indices as [tiles, n * block] token indices."""
    return (blocks.unsqueeze(-1) * block + torch.arange(block, device=blocks.device)).flatten(1)
