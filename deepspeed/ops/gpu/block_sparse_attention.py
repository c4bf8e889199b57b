"""Block-sparse attention in Triton: the kernels walk lists of the blocks that exist, forward and backward.

A program has some rows of one block row and takes its columns some tokens at a time, from as many blocks as these
come from, so small blocks do not make small products. Backward computes the weights again from the log-sum-exp: the
gradient of the queries by rows, those of keys and values by columns (lists of the transposed layout), so nothing is
added to by two programs and results are the same in every run. The gradient of relative positions, which sequences or
heads may share, has a kernel of its own that goes through all of them.

Not yet run on a GPU: compiled for sm_80, sm_89, sm_90 and sm_100 and run in Triton's interpreter.
"""

# A kernel is Triton, not Python: the types of its arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops.gpu.softmax_steps import (
    LOG2E,
    Tile,
    finished,
    finite,
    joined,
    power_of_two,
    scores_gradient,
    where_tensors_are,
)
from deepspeed.ops.gpu.types import operand_type

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _listed(columns, start, count, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens ``start`` and on of a list of blocks, and which of them exist."""
    at = start + tl.arange(0, WIDTH)
    exists = at < count
    return tl.load(columns + at // BLOCK, mask=exists, other=0) * BLOCK + at % BLOCK, exists


@triton.jit
def _list_of(starts, row, BLOCK: tl.constexpr):
    """Return the start of one block row's list, and its length in tokens."""
    first = tl.load(starts + row)
    return first, ((tl.load(starts + row + 1) - first) * BLOCK).to(tl.int32)


@triton.jit
def _rows_in(tile, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The block row of a tile, its tokens, and which of them exist."""
    PARTS: tl.constexpr = (BLOCK + ROWS - 1) // ROWS
    in_block = (tile % PARTS) * ROWS + tl.arange(0, ROWS)
    return tile // PARTS, tile // PARTS * BLOCK + in_block, in_block < BLOCK


@triton.jit
def _own(heads, block_rows, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return the program's sequence and head, and `_rows_in` its tile."""
    tiles = block_rows * ((BLOCK + ROWS - 1) // ROWS)
    sequence, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row, rows, inside = _rows_in(tile, BLOCK, ROWS)
    return sequence // heads, sequence % heads, row, rows, inside


@triton.jit
def _rows_of(pointer, tokens, exists, numbers, size: tl.constexpr):
    """[tokens, head size] of one head."""
    return tl.load(
        pointer + tokens[:, None] * size + numbers[None, :],
        mask=exists[:, None] & (numbers < size)[None, :],
        other=0.0,
    )


@triton.jit
def _added(
    scores,
    rows,
    columns,
    seen,
    batch,
    head,
    key_bias,
    score_bias,
    positions,
    positions_batch,
    positions_head,
    tokens,
    CAUSAL: tl.constexpr,
):
    """Scores with masks and positions; ``rows``, ``columns`` and ``seen`` broadcast to the scores, whichever way these
    lie. (What comes later exists, too: a mask without the causal order keeps loads of many numbers whole.)"""
    if key_bias is not None:
        of_keys = tl.load(key_bias + batch.to(tl.int64) * tokens + columns, mask=columns < tokens, other=0.0)
        scores += of_keys.to(tl.float32) * _LOG2E
    place = rows.to(tl.int64) * tokens + columns
    if score_bias is not None:
        scores += tl.load(score_bias + place, mask=seen, other=0.0).to(tl.float32) * _LOG2E
    if positions is not None:
        of_head = positions + batch.to(tl.int64) * positions_batch + head.to(tl.int64) * positions_head
        scores += tl.load(of_head + place, mask=seen, other=0.0).to(tl.float32) * _LOG2E
    if CAUSAL:
        seen = seen & (rows >= columns)
    return tl.where(seen, scores, float("-inf"))


@triton.jit(do_not_specialize=["block_rows"])
def _forward(
    query,
    key,
    value,
    output,
    lse,
    starts,
    columns,
    layout_of,
    key_bias,
    score_bias,
    positions,
    positions_batch,
    positions_head,
    scale,  # times log2(e)
    heads,
    tokens,
    block_rows,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    size: tl.constexpr,
    SIZE: tl.constexpr,  # a power of two
    CAUSAL: tl.constexpr,
    DOT: tl.constexpr,
):
    batch, head, row, rows, inside = _own(heads, block_rows, BLOCK, ROWS)
    first, count = _list_of(starts + tl.load(layout_of + head) * (block_rows + 1), row, BLOCK)
    base = (batch * heads + head).to(tl.int64) * tokens
    numbers = tl.arange(0, SIZE)

    q = _rows_of(query + base * size, rows, inside, numbers, size).to(DOT)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(0, count, COLUMNS):
        seen, exists = _listed(columns + first, start, count, BLOCK, COLUMNS)
        k = _rows_of(key + base * size, seen, exists, numbers, size).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = _added(
            scores,
            rows[:, None],
            seen[None, :],
            inside[:, None] & exists[None, :],
            batch,
            head,
            key_bias,
            score_bias,
            positions,
            positions_batch,
            positions_head,
            tokens,
            CAUSAL,
        )
        v = _rows_of(value + base * size, seen, exists, numbers, size).to(DOT)
        top, total, out = joined(top, total, out, scores, v, DOT)
    out, of_row = finished(top, total, out)
    tl.store(lse + base + rows, of_row, mask=inside)
    tl.store(
        output + base * size + rows[:, None] * size + numbers[None, :],
        out.to(output.dtype.element_ty),
        mask=inside[:, None] & (numbers < size)[None, :],
    )


@triton.jit(do_not_specialize=["block_rows"])
def _query_gradient(
    query,
    key,
    value,
    output,
    lse,
    grad,
    spread,
    grad_query,
    starts,
    columns,
    layout_of,
    key_bias,
    score_bias,
    positions,
    positions_batch,
    positions_head,
    scale,
    heads,
    tokens,
    block_rows,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    size: tl.constexpr,
    SIZE: tl.constexpr,  # a power of two
    CAUSAL: tl.constexpr,
    DOT: tl.constexpr,
):
    """By rows. Leaves ``spread``, the product of output and its gradient, for the other kernels."""
    batch, head, row, rows, inside = _own(heads, block_rows, BLOCK, ROWS)
    first, count = _list_of(starts + tl.load(layout_of + head) * (block_rows + 1), row, BLOCK)
    base = (batch * heads + head).to(tl.int64) * tokens
    numbers = tl.arange(0, SIZE)

    q = _rows_of(query + base * size, rows, inside, numbers, size).to(DOT)
    of_out = _rows_of(grad + base * size, rows, inside, numbers, size)
    out = _rows_of(output + base * size, rows, inside, numbers, size)
    of_row = tl.sum(of_out.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(spread + base + rows, of_row, mask=inside)
    of_out = of_out.to(DOT)
    normal = finite(tl.load(lse + base + rows, mask=inside, other=0.0))
    found = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(0, count, COLUMNS):
        seen, exists = _listed(columns + first, start, count, BLOCK, COLUMNS)
        k = _rows_of(key + base * size, seen, exists, numbers, size).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = _added(
            scores,
            rows[:, None],
            seen[None, :],
            inside[:, None] & exists[None, :],
            batch,
            head,
            key_bias,
            score_bias,
            positions,
            positions_batch,
            positions_head,
            tokens,
            CAUSAL,
        )
        v = _rows_of(value + base * size, seen, exists, numbers, size).to(DOT)
        of_scores = scores_gradient(tl.exp2(scores - normal[:, None]), of_out, v, of_row[:, None])
        found += tl.dot(of_scores.to(DOT), k, input_precision="ieee")
    tl.store(
        grad_query + base * size + rows[:, None] * size + numbers[None, :],
        (found * (scale / _LOG2E)).to(grad_query.dtype.element_ty),
        mask=inside[:, None] & (numbers < size)[None, :],
    )


@triton.jit(do_not_specialize=["block_rows"])
def _key_gradients(
    query,
    key,
    value,
    lse,
    grad,
    spread,
    grad_key,
    grad_value,
    starts,  # of the transposed layout: of each block column the rows that see it
    columns,
    layout_of,
    key_bias,
    score_bias,
    positions,
    positions_batch,
    positions_head,
    scale,
    heads,
    tokens,
    block_rows,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    size: tl.constexpr,
    SIZE: tl.constexpr,  # a power of two
    CAUSAL: tl.constexpr,
    DOT: tl.constexpr,
):
    """By columns: a program has ``ROWS`` keys and takes the queries that see them ``COLUMNS`` at a time."""
    batch, head, row, keys, inside = _own(heads, block_rows, BLOCK, ROWS)
    first, count = _list_of(starts + tl.load(layout_of + head) * (block_rows + 1), row, BLOCK)
    base = (batch * heads + head).to(tl.int64) * tokens
    numbers = tl.arange(0, SIZE)

    k = _rows_of(key + base * size, keys, inside, numbers, size).to(DOT)
    v = _rows_of(value + base * size, keys, inside, numbers, size).to(DOT)
    of_k = tl.zeros([ROWS, SIZE], tl.float32)
    of_v = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(0, count, COLUMNS):
        rows, exists = _listed(columns + first, start, count, BLOCK, COLUMNS)
        q = _rows_of(query + base * size, rows, exists, numbers, size).to(DOT)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        scores = _added(
            scores,
            rows[None, :],
            keys[:, None],
            inside[:, None] & exists[None, :],
            batch,
            head,
            key_bias,
            score_bias,
            positions,
            positions_batch,
            positions_head,
            tokens,
            CAUSAL,
        )
        normal = finite(tl.load(lse + base + rows, mask=exists, other=0.0))
        weights = tl.exp2(scores - normal[None, :])
        of_out = _rows_of(grad + base * size, rows, exists, numbers, size).to(DOT)
        of_v += tl.dot(weights.to(DOT), of_out, input_precision="ieee")
        of_row = tl.load(spread + base + rows, mask=exists, other=0.0)
        of_scores = scores_gradient(weights, v, of_out, of_row[None, :])
        of_k += tl.dot(of_scores.to(DOT), q, input_precision="ieee")
    place = base * size + keys[:, None] * size + numbers[None, :]
    wanted = inside[:, None] & (numbers < size)[None, :]
    of_k *= scale / _LOG2E
    tl.store(grad_key + place, of_k.to(grad_key.dtype.element_ty), mask=wanted)
    tl.store(grad_value + place, of_v.to(grad_value.dtype.element_ty), mask=wanted)


@triton.jit
def _tile_gradient(
    query,
    key,
    value,
    lse,
    grad,
    spread,
    key_bias,
    score_bias,
    positions,
    positions_batch,
    positions_head,
    scale,
    batch,
    head,
    heads,
    tokens,
    rows,
    inside,
    seen,
    exists,
    size: tl.constexpr,
    SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return the gradient of the scores of ``rows`` with the keys ``seen``, of one head of one sequence."""
    numbers = tl.arange(0, SIZE)
    base = (batch * heads + head).to(tl.int64) * tokens
    q = _rows_of(query + base * size, rows, inside, numbers, size).to(DOT)
    k = _rows_of(key + base * size, seen, exists, numbers, size).to(DOT)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = _added(
        scores,
        rows[:, None],
        seen[None, :],
        inside[:, None] & exists[None, :],
        batch,
        head,
        key_bias,
        score_bias,
        positions,
        positions_batch,
        positions_head,
        tokens,
        CAUSAL,
    )
    normal = finite(tl.load(lse + base + rows, mask=inside, other=0.0))
    of_out = _rows_of(grad + base * size, rows, inside, numbers, size).to(DOT)
    v = _rows_of(value + base * size, seen, exists, numbers, size).to(DOT)
    of_row = tl.load(spread + base + rows, mask=inside, other=0.0)
    return scores_gradient(tl.exp2(scores - normal[:, None]), of_out, v, of_row[:, None])


@triton.jit(do_not_specialize=["batches", "count_members", "parts"])
def _positions_gradient(
    query,
    key,
    value,
    lse,
    grad,
    spread,
    grad_positions,  # fp32, added to
    members,  # heads that have this layout
    starts,  # of this layout
    columns,
    key_bias,
    score_bias,
    positions,
    positions_batch,
    positions_head,
    scale,
    batches,
    count_members,
    heads,
    tokens,
    parts,  # of a list, each of COLUMNS tokens
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    size: tl.constexpr,
    SIZE: tl.constexpr,  # a power of two
    CAUSAL: tl.constexpr,
    BY_BATCH: tl.constexpr,
    BY_HEAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """Sum the gradient of some rows and columns over the sequences and heads that share them."""
    tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row, rows, inside = _rows_in(tile, BLOCK, ROWS)
    first, count = _list_of(starts, row, BLOCK)
    if part * COLUMNS < count:
        seen, exists = _listed(columns + first, part * COLUMNS, count, BLOCK, COLUMNS)
        # One plane of the positions is that of these sequences and heads:
        each_batch = 1 if BY_BATCH else batches
        each_head = 1 if BY_HEAD else count_members
        first_batch, first_head = tl.program_id(1), tl.program_id(2)
        found = tl.zeros([ROWS, COLUMNS], tl.float32)
        for turn in range(each_batch * each_head):
            batch = first_batch + turn // each_head
            head = tl.load(members + first_head + turn % each_head).to(tl.int32)
            found += _tile_gradient(
                query, key, value, lse, grad, spread, key_bias, score_bias, positions, positions_batch, positions_head,
                scale, batch, head, heads, tokens, rows, inside, seen, exists, size, SIZE, CAUSAL, DOT,
            )  # fmt: skip
        head = tl.load(members + first_head)
        plane = grad_positions + first_batch.to(tl.int64) * positions_batch + head * positions_head
        place = plane + rows[:, None].to(tl.int64) * tokens + seen[None, :]
        wanted = inside[:, None] & exists[None, :]
        tl.store(place, tl.load(place, mask=wanted, other=0.0) + found, mask=wanted)


class Lists(NamedTuple):
    """A layout on a device, as `deepspeed.ops.sparse_attention.host_attention.RowLists` has it."""

    starts: Tensor  # [layouts, block rows + 1]
    columns: Tensor  # int32
    layout_of: Tensor  # [heads]
    longest: int  # blocks in a row, at most


class BlockLayout(NamedTuple):
    """By rows, by columns, and for each of the different layouts the heads that have it."""

    rows: Lists
    columns: Lists
    members: list[Tensor]
    block: int


class Added(NamedTuple):
    """Terms added to the scores: ``keys`` [batch, tokens] and ``scores`` [tokens, tokens], which have no gradient, and
    ``positions`` [1 or batch, 1 or heads, tokens, tokens], which may have one. Nobody sees a later token if ``causal``.
    """

    keys: Tensor | None = None
    scores: Tensor | None = None
    positions: Tensor | None = None
    causal: bool = False


class BlockSparseAttention(torch.autograd.Function):
    """[batch, heads, tokens, size] in and out."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor | None,
        layout: BlockLayout,
        added: Added,
        scale: float,
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        added = added._replace(
            keys=_contiguous(added.keys), scores=_contiguous(added.scores), positions=_contiguous(positions)
        )
        out, lse = forward(q, k, v, layout, added, scale)
        ctx.save_for_backward(q, k, v, out, lse, *added[:3])
        ctx.rest = (layout, added.causal, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, *masks = ctx.saved_tensors
        layout, causal, scale = ctx.rest
        wanted = bool(ctx.needs_input_grad[3])
        found = backward(
            grads[0].contiguous(), q, k, v, out, lse, layout, Added(*masks, causal), scale, wanted
        )
        return *found, None, None, None


@where_tensors_are
def forward(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, added: Added, scale: float
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp [batch, heads, tokens] in units of log 2."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    tile = forward_tile(q, layout.block)
    lists = layout.rows
    _forward[_programs(q, layout, tile)](
        *(q, k, v, out, lse, *lists[:3], *_pointers(added)),
        *(scale * LOG2E, q.shape[1], q.shape[2], q.shape[2] // layout.block),
        **_constants(q, layout, added, tile),
        **tile.options,
    )
    return out, lse


@where_tensors_are
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    added: Added,
    scale: float,
    positions_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and positions."""
    of_q, of_k, of_v = (torch.empty_like(x) for x in (q, k, v))
    spread = torch.empty_like(lse)
    tile = backward_tile(q, layout.block)
    sizes = (scale * LOG2E, q.shape[1], q.shape[2], q.shape[2] // layout.block)
    pointers = _pointers(added)
    constants = {**_constants(q, layout, added, tile), **tile.options}
    _query_gradient[_programs(q, layout, tile)](
        *(q, k, v, out, lse, grad, spread, of_q, *layout.rows[:3], *pointers, *sizes), **constants
    )
    _key_gradients[_programs(q, layout, tile)](
        *(q, k, v, lse, grad, spread, of_k, of_v, *layout.columns[:3], *pointers, *sizes), **constants
    )
    of_positions = None
    if positions_wanted and added.positions is not None:
        of_positions = _of_positions((q, k, v, lse, grad, spread), layout, added, scale, tile)
    return of_q, of_k, of_v, of_positions


def _of_positions(
    tensors: tuple[Tensor, ...], layout: BlockLayout, added: Added, scale: float, tile: Tile
) -> Tensor:
    q, positions = tensors[0], added.positions
    assert positions is not None
    found = torch.zeros_like(positions, dtype=torch.float32)
    batch, heads, tokens, _ = q.shape
    by_batch, by_head = (dim > 1 for dim in positions.shape[:2])
    parts = max(1, -(-layout.rows.longest * layout.block // tile.columns))
    tiles = tokens // layout.block * -(-layout.block // tile.rows)
    # One launch after another: heads with different layouts may share a plane.
    for number, members in enumerate(layout.members):
        grid = (tiles * parts, batch if by_batch else 1, len(members) if by_head else 1)
        _positions_gradient[grid](
            *(*tensors, found, members, layout.rows.starts[number], layout.rows.columns),
            *_pointers(added),
            *(scale * LOG2E, batch, len(members), heads, tokens, parts),
            **_constants(q, layout, added, tile),
            BY_BATCH=by_batch,
            BY_HEAD=by_head,
            **tile.options,
        )
    return found.to(positions.dtype)


def forward_tile(q: Tensor, block: int) -> Tile:
    """Chosen by what compilers say of registers and shared memory; no time was measured yet."""
    size, rows = power_of_two(q.shape[-1]), power_of_two(block)
    if q.dtype is torch.float32:
        return Tile(min(rows, 32), 32, 4, 1) if size <= 64 else Tile(min(rows, 32), 16, 8, 1)
    if size > 128:
        return Tile(min(rows, 64), 32, 4, 2)
    if rows >= 128:
        return Tile(128, 64, 8, 2)
    return Tile(rows, 64, 4 if rows > 16 else 2, 2)


def backward_tile(q: Tensor, block: int) -> Tile:
    size, rows = power_of_two(q.shape[-1]), power_of_two(block)
    if q.dtype is torch.float32:
        return Tile(min(rows, 32), 32, 4 if size <= 32 else 8, 1) if size <= 64 else Tile(16, 16, 8, 1)
    if size > 128:
        return Tile(min(rows, 32), 32, 4, 1)
    return Tile(min(rows, 64), 64 if size <= 64 else 32, 4, 2)


def _programs(q: Tensor, layout: BlockLayout, tile: Tile) -> tuple[int]:
    blocks = q.shape[2] // layout.block
    return (q.shape[0] * q.shape[1] * blocks * -(-layout.block // tile.rows),)


def _pointers(added: Added) -> tuple[Any, ...]:
    """Masks, positions and their strides."""
    of, strides = added.positions, (0, 0)
    if of is not None:
        strides = tuple(of.stride(dim) if of.shape[dim] > 1 else 0 for dim in (0, 1))
    return *added[:3], *strides


def _constants(q: Tensor, layout: BlockLayout, added: Added, tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK": layout.block,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "size": q.shape[3],
        "SIZE": power_of_two(q.shape[-1]),
        "CAUSAL": added.causal,
        "DOT": operand_type(q.dtype),
    }


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
