"""Steps of the block-sparse attention kernels: lists of blocks, tokens of one head, scores with masks and positions."""

# A kernel is Triton, not Python: its argument types mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from deepspeed.ops.gpu.softmax_steps import biased


@triton.jit
def listed(columns, start, count, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return tokens from ``start`` on of a list of blocks, and which of them exist."""
    at = start + tl.arange(0, WIDTH)
    exists = at < count
    return tl.load(columns + at // BLOCK, mask=exists, other=0) * BLOCK + at % BLOCK, exists


@triton.jit
def list_of(starts, row, BLOCK: tl.constexpr):
    """Return the start of one block row's list, and its length in tokens."""
    first = tl.load(starts + row)
    return first, ((tl.load(starts + row + 1) - first) * BLOCK).to(tl.int32)


@triton.jit
def rows_in(tile, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return the block row of a tile, its tokens, and which of them exist."""
    PARTS: tl.constexpr = (BLOCK + ROWS - 1) // ROWS
    in_block = (tile % PARTS) * ROWS + tl.arange(0, ROWS)
    return tile // PARTS, tile // PARTS * BLOCK + in_block, in_block < BLOCK


@triton.jit
def own(heads, block_rows, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return the program's sequence and head, and `rows_in` of its tile."""
    tiles = block_rows * ((BLOCK + ROWS - 1) // ROWS)
    sequence, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row, rows, inside = rows_in(tile, BLOCK, ROWS)
    return sequence // heads, sequence % heads, row, rows, inside


@triton.jit
def loaded(pointer, tokens, exists, size: tl.constexpr, SIZE: tl.constexpr):
    """Load [tokens, head size] of one head; zeros outside."""
    numbers = tl.arange(0, SIZE)
    mask = exists[:, None] & (numbers < size)[None, :]
    return tl.load(pointer + tokens[:, None] * size + numbers[None, :], mask=mask, other=0.0)


@triton.jit
def stored(pointer, found, tokens, exists, size: tl.constexpr, SIZE: tl.constexpr):
    """Store in the layout that `loaded` reads."""
    numbers = tl.arange(0, SIZE)
    mask = exists[:, None] & (numbers < size)[None, :]
    place = pointer + tokens[:, None] * size + numbers[None, :]
    tl.store(place, found.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def scores_of(
    q,
    k,
    rows,
    inside,
    columns,
    exists,
    scale,
    key_bias,  # of the sequence
    score_bias,
    positions,  # of the sequence and head
    tokens,
    CAUSAL: tl.constexpr,
    BY_KEYS: tl.constexpr,
):
    """Return scores with masks and positions, [rows, columns], or transposed if ``BY_KEYS``. (Later tokens exist, too:
    load masks without the causal condition keep loads vectorized.)"""
    if BY_KEYS:
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        rows, columns, seen = rows[None, :], columns[:, None], inside[None, :] & exists[:, None]
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        rows, columns, seen = rows[:, None], columns[None, :], inside[:, None] & exists[None, :]
    scores = biased(scores, key_bias, columns, columns < tokens)
    place = rows.to(tl.int64) * tokens + columns
    scores = biased(scores, score_bias, place, seen)
    scores = biased(scores, positions, place, seen)
    if CAUSAL:
        seen = seen & (rows >= columns)
    return tl.where(seen, scores, float("-inf"))
