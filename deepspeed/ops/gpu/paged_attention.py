"""Attention over a paged cache in Triton: prefill chunks, decode tokens, or both in one call.

The rows of one program are the queries of some tokens, of all heads that share keys, so that keys are read once for
them. Short pieces (decoding) fit into one program, but may attend to many keys: the keys are split into parts of fixed
length, whose results another kernel combines. As the length is fixed, a sequence's result does not depend on the rest
of its batch.

Not yet run on a GPU: compiled for sm_80, sm_89, sm_90 and sm_100 and run in Triton's interpreter.
"""

# A kernel is Triton, not Python: its argument types mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.gpu.softmax_steps import LOG2E, Tile, finished, joined, power_of_two, where_tensors_are
from deepspeed.ops.gpu.types import operand_type

SPLIT = 512
"""Keys per program for a piece whose rows fit into one program. (Other pieces have enough programs.)"""

FEW_ROWS = 16
"""Rows (tokens times heads that share keys) per program for short pieces."""

MANY_ROWS = 64
"""Rows per program for other pieces; more if more heads share keys."""

_LOG2E = tl.constexpr(LOG2E)
_ITEM = tl.constexpr(6)  # numbers per work item


@triton.jit
def _rows_of(pieces, piece, first, kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return per row of a program: its token within the piece (counted from ``first``), its head, and whether it
    exists.
    """
    row = tl.arange(0, ROWS)
    token, head = first + row // GROUP, kv_head * GROUP + row % GROUP
    inside = (row < ROWS // GROUP * GROUP) & (token < tl.load(pieces + 3 * piece + 1))
    return token, head, inside


@triton.jit
def _soft_capped(scores, softcap):
    """Return ``softcap * tanh(scores / softcap)``."""
    return softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)


@triton.jit
def _stored(output, out, token, head, heads, inside, size: tl.constexpr, SIZE: tl.constexpr):
    """Store the results of rows to [tokens, heads, size]."""
    place = (token.to(tl.int64) * heads + head) * size
    number = tl.arange(0, SIZE)
    tl.store(
        output + place[:, None] + number[None, :],
        out.to(output.dtype.element_ty),
        mask=inside[:, None] & (number < size)[None, :],
    )


@triton.jit
def _queries(
    query, token, head, inside, query_token, query_head, key_size: tl.constexpr, KEY_SIZE: tl.constexpr
):
    """Return the queries of a program's rows, [ROWS, KEY_SIZE]."""
    key_column = tl.arange(0, KEY_SIZE)
    row_at = query + token.to(tl.int64) * query_token + head.to(tl.int64) * query_head
    return tl.load(
        row_at[:, None] + key_column[None, :],
        mask=inside[:, None] & (key_column < key_size)[None, :],
        other=0.0,
    )


@triton.jit
def _scored(
    q,
    k,
    column,
    exists,
    position,
    slopes,
    slope,
    scale,
    softcap,
    window,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Return the scores of a tile of keys, in base 2: minus infinity where a row does not attend to the key."""
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if SOFTCAP:
        scores = _soft_capped(scores, softcap)
    if slopes is not None:
        scores += slope[:, None] * (column[None, :] - position[:, None]).to(tl.float32)
    seen = exists[None, :] & (column[None, :] <= position[:, None])
    if WINDOW:
        seen = seen & (column[None, :] > position[:, None] - window)
    return tl.where(seen, scores * _LOG2E, float("-inf"))


@triton.jit
def _stored_part(
    parts, parts_lse, out, lse, part, value_size: tl.constexpr, VALUE_SIZE: tl.constexpr, ROWS: tl.constexpr
):
    """Store the results of one part of a piece, for the kernel that combines them."""
    place = (part.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    value_column = tl.arange(0, VALUE_SIZE)
    tl.store(parts_lse + place, lse)
    tl.store(
        parts + place[:, None] * value_size + value_column[None, :],
        out,
        mask=(value_column < value_size)[None, :],
    )


@triton.jit
def _initial_sums(sinks, item, head, inside, ROWS: tl.constexpr):
    """Return the running maximum and sum before the first key: those of the attention sink, if there is one."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        begins = tl.load(item + 5) != 0  # a sink counts once
        top = tl.where(inside & begins, tl.load(sinks + head, mask=inside, other=0.0) * _LOG2E, top)
        total = tl.where(inside & begins, 1.0, total)
    return top, total


@triton.jit(do_not_specialize=["longest", "window"])
def _attend(
    query,
    keys,
    values,
    output,
    items,  # [programs, _ITEM] int32: piece, first token, first key, end of the keys, number of the part or -1, first?
    tables,  # [pieces, longest] int32: blocks
    pieces,  # [pieces, 3] int32: position of the first token, tokens, row of the first token
    sinks,
    slopes,
    parts,  # [parts, kv heads, ROWS, value size] fp32
    parts_lse,
    query_head,
    query_token,
    longest,
    scale,
    softcap,
    window,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DOT: tl.constexpr,
):
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    item = items + tl.program_id(0) * _ITEM
    piece, first_key, end = tl.load(item), tl.load(item + 2), tl.load(item + 3)
    token, head, inside = _rows_of(pieces, piece, tl.load(item + 1), kv_head, GROUP, ROWS)
    position = tl.load(pieces + 3 * piece) + token
    token += tl.load(pieces + 3 * piece + 2)
    key_column, value_column = tl.arange(0, KEY_SIZE), tl.arange(0, VALUE_SIZE)
    blocks = tl.cdiv(end, BLOCK)

    q = _queries(query, token, head, inside, query_token, query_head, key_size, KEY_SIZE).to(DOT)
    top, total = _initial_sums(sinks, item, head, inside, ROWS)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head, mask=inside, other=0.0)
    out = tl.zeros([ROWS, VALUE_SIZE], tl.float32)
    # Keys are stored transposed: loads are vectorized only if the compiler knows that they are aligned and unmasked. So
    # steps start at multiples of their length, and all keys of a listed block are read; keys that are not this
    # program's are masked in the scores.
    for start in range(first_key // COLUMNS * COLUMNS, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        exists = (column >= first_key) & (column < end)
        listed = column // BLOCK < blocks
        block = tl.load(tables + piece * longest + column // BLOCK, mask=listed, other=0)
        base = block.to(tl.int64) * kv_heads + kv_head
        at = column % BLOCK
        k_at = keys + (base * (key_size * BLOCK) + at)[None, :] + key_column[:, None] * BLOCK
        k = tl.load(k_at, mask=(key_column < key_size)[:, None] & listed[None, :], other=0.0).to(DOT)
        scores = _scored(
            q, k, column, exists, position, slopes, slope, scale, softcap, window, WINDOW, SOFTCAP
        )
        v_at = values + (base * (value_size * BLOCK) + at * value_size)[:, None] + value_column[None, :]
        v = tl.load(v_at, mask=exists[:, None] & (value_column < value_size)[None, :], other=0.0).to(DOT)
        top, total, out = joined(top, total, out, scores, v, DOT)
    out, lse = finished(top, total, out)
    part = tl.load(item + 4)
    if part < 0:
        _stored(output, out, token, head, kv_heads * GROUP, inside, value_size, VALUE_SIZE)
    else:
        _stored_part(parts, parts_lse, out, lse, part, value_size, VALUE_SIZE, ROWS)


@triton.jit
def _join(
    parts,
    parts_lse,
    output,
    joins,  # [programs, 4] int32: piece, its first token here, first part, number of parts
    pieces,
    value_size: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    join = joins + tl.program_id(0) * 4
    piece, first, count = tl.load(join), tl.load(join + 2), tl.load(join + 3)
    token, head, inside = _rows_of(pieces, piece, tl.load(join + 1), kv_head, GROUP, ROWS)
    token += tl.load(pieces + 3 * piece + 2)
    value_column = tl.arange(0, VALUE_SIZE)
    exists = (value_column < value_size)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, VALUE_SIZE], tl.float32)
    for part in range(first, first + count):
        place = ((part * kv_heads + kv_head) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        lse = tl.load(parts_lse + place)
        found = tl.load(
            parts + place[:, None] * value_size + value_column[None, :],
            mask=inside[:, None] & exists,
            other=0.0,
        )
        higher = tl.maximum(top, lse)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weight = tl.exp2(top - base), tl.exp2(lse - base)
        out = out * shrink[:, None] + found * weight[:, None]
        total = total * shrink + weight
        top = higher
    out, _ = finished(top, total, out)
    _stored(output, out, token, head, kv_heads * GROUP, inside, value_size, VALUE_SIZE)


class _Work(NamedTuple):
    """One launch: work items of ``rows`` rows, and the joins of their parts."""

    rows: int
    items: Tensor
    joins: Tensor
    parts: int


class PagedPieces:
    """The sequences of one forward, for all of its layers: (blocks, position of the first token, tokens) of each, with
    tokens packed. Work is divided once per window and number of heads that share keys."""

    def __init__(self, pieces: Sequence[tuple[Sequence[int], int, int]], device: torch.device) -> None:
        self.device = device
        self.longest = max((len(blocks) for blocks, _, _ in pieces), default=0)
        self._spans = [(start, count) for _, start, count in pieces]
        rows, row = [], 0
        for start, count in self._spans:
            rows.append((start, count, row))
            row += count
        self.tokens = row
        tables = [[*blocks, *[0] * (self.longest - len(blocks))] for blocks, _, _ in pieces]
        self.tables = torch.tensor(tables, dtype=torch.int32).to(device)
        self.spans = torch.tensor(rows, dtype=torch.int32).to(device)
        self._work: dict[tuple[int, int], list[_Work]] = {}

    def work(self, window: int, group: int) -> list[_Work]:
        known = (window, group)
        if known not in self._work:
            few = [i for i, (_, count) in enumerate(self._spans) if 0 < count * group <= FEW_ROWS]
            many = [i for i, (_, count) in enumerate(self._spans) if count * group > FEW_ROWS]
            self._work[known] = [
                self._divided(of, rows, window, group)
                for of, rows in ((few, FEW_ROWS), (many, max(MANY_ROWS, power_of_two(group))))
                if of
            ]
        return self._work[known]

    def _divided(self, of: list[int], rows: int, window: int, group: int) -> _Work:
        items, joins, parts, each = [], [], 0, rows // group
        for piece in of:
            start, count = self._spans[piece]
            for token in range(0, count, each):
                end = start + min(count, token + each)
                first = max(0, start + token - window + 1) if window else 0
                cuts = [(first, end)]
                if count <= each:
                    starts = range(first // SPLIT * SPLIT, end, SPLIT)  # independent of the token
                    cuts = [(max(first, at), min(end, at + SPLIT)) for at in starts]
                if len(cuts) == 1:
                    items.append((piece, token, *cuts[0], -1, 1))
                    continue
                joins.append((piece, token, parts, len(cuts)))
                items += [
                    (piece, token, *cut, parts + number, int(number == 0)) for number, cut in enumerate(cuts)
                ]
                parts += len(cuts)
        upload = [
            torch.tensor(x, dtype=torch.int32).view(-1, n) for x, n in ((items, _ITEM.value), (joins, 4))
        ]
        return _Work(rows, *(x.to(self.device) for x in upload), parts)


@where_tensors_are
def paged_attention(
    query: Tensor,
    pages: tuple[Tensor, Tensor],
    pieces: PagedPieces,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attend from pieces to their own sequences, whose keys and values are in the cache.

    Args:
        query: [heads, tokens, key size].
        pages: keys [blocks, kv heads, key size, block size] and values [.., block size, value size] of the cache.
        scale: of the products of queries and keys.
        window: a token attends to itself and the ``window - 1`` before it; 0: to all before it.
        softcap: scores s become softcap * tanh(s / softcap); 0: uncapped.
        sinks: [heads], extra softmax scores without a value.
        slopes: [heads], of ALiBi: scores decrease by slope times the distance to the key.

    Returns:
        [tokens, heads, value size].
    """
    query = query if query.stride(-1) == 1 else query.contiguous()
    keys, values = pages
    heads, tokens, key_size = query.shape
    kv_heads, value_size, group = keys.shape[1], values.shape[3], heads // keys.shape[1]
    output = query.new_empty(tokens, heads, value_size)
    sinks, slopes = (None if x is None else x.float().contiguous() for x in (sinks, slopes))
    sizes = {"value_size": value_size, "VALUE_SIZE": power_of_two(value_size), "GROUP": group}
    for work in pieces.work(window, group):
        parts = query.new_empty(max(1, work.parts), kv_heads, work.rows, value_size, dtype=torch.float32)
        parts_lse = parts.new_empty(parts.shape[:3])
        tile = tile_for(keys.dtype, max(key_size, value_size), work.rows)
        _attend[(len(work.items), kv_heads)](
            *(query, keys, values, output, work.items, pieces.tables, pieces.spans, sinks, slopes),
            *(parts, parts_lse, query.stride(0), query.stride(1), pieces.longest),
            *(float(scale), float(softcap or 1.0), window),
            **sizes,
            key_size=key_size,
            KEY_SIZE=power_of_two(key_size),
            BLOCK=keys.shape[3],
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            WINDOW=window > 0,
            SOFTCAP=softcap > 0,
            DOT=operand_type(keys.dtype),
            **tile.options,
        )
        if len(work.joins):
            _join[(len(work.joins), kv_heads)](
                *(parts, parts_lse, output, work.joins, pieces.spans), **sizes, ROWS=tile.rows
            )
    return output


def tile_for(dtype: torch.dtype, size: int, rows: int) -> Tile:
    """Choose a tile by the compiler's register and shared-memory counts; not timed yet."""
    if dtype is torch.float32:
        return Tile(rows, 32 if size <= 128 else 16, 4 if rows <= FEW_ROWS else 8, 1)
    stages = 2 if rows <= FEW_ROWS or size <= 128 else 1
    return Tile(rows, 64 if size <= 128 else 32, 4 if rows <= MANY_ROWS else 8, stages)
