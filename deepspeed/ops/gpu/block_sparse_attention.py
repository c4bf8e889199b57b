"""Block-sparse attention in Triton: the kernels iterate over lists of present blocks, forward and backward.

A program has a tile of rows within one block row, and iterates over its columns a tile at a time, spanning several
blocks, so small blocks do not make small products. Backward recomputes the weights from the log-sum-exp: the gradient
of the queries by rows, those of keys and values by columns (lists of the transposed layout), so there are no atomics
and results are deterministic. The gradient of relative positions, which sequences or heads may share, has a separate
kernel that sums over all of them.

Not yet run on a GPU: compiled for sm_80, sm_89, sm_90 and sm_100 and run in Triton's interpreter.
"""

# A kernel is Triton, not Python: its argument types mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops.gpu.block_sparse_steps import list_of, listed, loaded, own, rows_in, scores_of, stored
from deepspeed.ops.gpu.softmax_steps import (
    LOG2E,
    Tile,
    backward_tile,
    contiguous,
    finished,
    finite,
    forward_tile,
    joined,
    power_of_two,
    scores_gradient,
    where_tensors_are,
)
from deepspeed.ops.gpu.types import operand_type

_LOG2E = tl.constexpr(LOG2E)


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
    batch, head, row, rows, inside = own(heads, block_rows, BLOCK, ROWS)
    first, count = list_of(starts + tl.load(layout_of + head) * (block_rows + 1), row, BLOCK)
    base = (batch * heads + head).to(tl.int64) * tokens
    if key_bias is not None:
        key_bias += batch.to(tl.int64) * tokens
    if positions is not None:
        positions += batch.to(tl.int64) * positions_batch + head.to(tl.int64) * positions_head

    q = loaded(query + base * size, rows, inside, size, SIZE).to(DOT)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(0, count, COLUMNS):
        seen, exists = listed(columns + first, start, count, BLOCK, COLUMNS)
        k = loaded(key + base * size, seen, exists, size, SIZE).to(DOT)
        scores = scores_of(
            q, k, rows, inside, seen, exists, scale, key_bias, score_bias, positions, tokens, CAUSAL, False
        )
        v = loaded(value + base * size, seen, exists, size, SIZE).to(DOT)
        top, total, out = joined(top, total, out, scores, v, DOT)
    out, row_lse = finished(top, total, out)
    tl.store(lse + base + rows, row_lse, mask=inside)
    stored(output + base * size, out, rows, inside, size, SIZE)


@triton.jit(do_not_specialize=["block_rows"])
def _query_gradient(
    query,
    key,
    value,
    output,
    lse,
    grad,
    delta,
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
    """Compute by rows. Also stores ``delta``, the row sums of output times its gradient, for the other kernels."""
    batch, head, row, rows, inside = own(heads, block_rows, BLOCK, ROWS)
    first, count = list_of(starts + tl.load(layout_of + head) * (block_rows + 1), row, BLOCK)
    base = (batch * heads + head).to(tl.int64) * tokens
    if key_bias is not None:
        key_bias += batch.to(tl.int64) * tokens
    if positions is not None:
        positions += batch.to(tl.int64) * positions_batch + head.to(tl.int64) * positions_head

    q = loaded(query + base * size, rows, inside, size, SIZE).to(DOT)
    grad_out = loaded(grad + base * size, rows, inside, size, SIZE)
    out = loaded(output + base * size, rows, inside, size, SIZE)
    row_delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta + base + rows, row_delta, mask=inside)
    grad_out = grad_out.to(DOT)
    normal = finite(tl.load(lse + base + rows, mask=inside, other=0.0))
    grad_q = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(0, count, COLUMNS):
        seen, exists = listed(columns + first, start, count, BLOCK, COLUMNS)
        k = loaded(key + base * size, seen, exists, size, SIZE).to(DOT)
        scores = scores_of(
            q, k, rows, inside, seen, exists, scale, key_bias, score_bias, positions, tokens, CAUSAL, False
        )
        v = loaded(value + base * size, seen, exists, size, SIZE).to(DOT)
        grad_scores = scores_gradient(tl.exp2(scores - normal[:, None]), grad_out, v, row_delta[:, None])
        grad_q += tl.dot(grad_scores.to(DOT), k, input_precision="ieee")
    stored(grad_query + base * size, grad_q * (scale / _LOG2E), rows, inside, size, SIZE)


@triton.jit(do_not_specialize=["block_rows"])
def _key_gradients(
    query,
    key,
    value,
    lse,
    grad,
    delta,
    grad_key,
    grad_value,
    starts,  # of the transposed layout: rows that attend to each block column
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
    """Compute by columns: a program has ``ROWS`` keys, and takes the queries attending to them ``COLUMNS`` at a
    time."""
    batch, head, row, keys, inside = own(heads, block_rows, BLOCK, ROWS)
    first, count = list_of(starts + tl.load(layout_of + head) * (block_rows + 1), row, BLOCK)
    base = (batch * heads + head).to(tl.int64) * tokens
    if key_bias is not None:
        key_bias += batch.to(tl.int64) * tokens
    if positions is not None:
        positions += batch.to(tl.int64) * positions_batch + head.to(tl.int64) * positions_head

    k = loaded(key + base * size, keys, inside, size, SIZE).to(DOT)
    v = loaded(value + base * size, keys, inside, size, SIZE).to(DOT)
    grad_k = tl.zeros([ROWS, SIZE], tl.float32)
    grad_v = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(0, count, COLUMNS):
        rows, exists = listed(columns + first, start, count, BLOCK, COLUMNS)
        q = loaded(query + base * size, rows, exists, size, SIZE).to(DOT)
        scores = scores_of(
            q, k, rows, exists, keys, inside, scale, key_bias, score_bias, positions, tokens, CAUSAL, True
        )
        normal = finite(tl.load(lse + base + rows, mask=exists, other=0.0))
        weights = tl.exp2(scores - normal[None, :])
        grad_out = loaded(grad + base * size, rows, exists, size, SIZE).to(DOT)
        grad_v += tl.dot(weights.to(DOT), grad_out, input_precision="ieee")
        row_delta = tl.load(delta + base + rows, mask=exists, other=0.0)
        grad_scores = scores_gradient(weights, v, grad_out, row_delta[None, :])
        grad_k += tl.dot(grad_scores.to(DOT), q, input_precision="ieee")
    stored(grad_key + base * size, grad_k * (scale / _LOG2E), keys, inside, size, SIZE)
    stored(grad_value + base * size, grad_v, keys, inside, size, SIZE)


@triton.jit(do_not_specialize=["batches", "count_members", "parts"])
def _positions_gradient(
    query,
    key,
    value,
    lse,
    grad,
    delta,
    grad_positions,  # fp32, accumulated into
    members,  # heads with this layout
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
    parts,  # tiles of COLUMNS tokens in a list
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
    """Sum the gradient of a tile of rows and columns over the sequences and heads that share it."""
    tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row, rows, inside = rows_in(tile, BLOCK, ROWS)
    first, count = list_of(starts, row, BLOCK)
    if part * COLUMNS < count:
        seen, exists = listed(columns + first, part * COLUMNS, count, BLOCK, COLUMNS)
        # One plane of the positions is shared by these sequences and heads:
        each_batch = 1 if BY_BATCH else batches
        each_head = 1 if BY_HEAD else count_members
        first_batch, first_head = tl.program_id(1), tl.program_id(2)
        plane = first_batch.to(tl.int64) * positions_batch + tl.load(members + first_head) * positions_head
        found = tl.zeros([ROWS, COLUMNS], tl.float32)
        for turn in range(each_batch * each_head):
            batch = first_batch + turn // each_head
            head = tl.load(members + first_head + turn % each_head).to(tl.int32)
            base = (batch * heads + head).to(tl.int64) * tokens
            sequence_bias = key_bias
            if key_bias is not None:
                sequence_bias = key_bias + batch.to(tl.int64) * tokens
            q = loaded(query + base * size, rows, inside, size, SIZE).to(DOT)
            k = loaded(key + base * size, seen, exists, size, SIZE).to(DOT)
            at = positions + plane
            scores = scores_of(
                q, k, rows, inside, seen, exists, scale, sequence_bias, score_bias, at, tokens, CAUSAL, False
            )
            normal = finite(tl.load(lse + base + rows, mask=inside, other=0.0))
            grad_out = loaded(grad + base * size, rows, inside, size, SIZE).to(DOT)
            v = loaded(value + base * size, seen, exists, size, SIZE).to(DOT)
            row_delta = tl.load(delta + base + rows, mask=inside, other=0.0)
            found += scores_gradient(tl.exp2(scores - normal[:, None]), grad_out, v, row_delta[:, None])
        place = grad_positions + plane + rows[:, None].to(tl.int64) * tokens + seen[None, :]
        wanted = inside[:, None] & exists[None, :]
        tl.store(place, tl.load(place, mask=wanted, other=0.0) + found, mask=wanted)


class Lists(NamedTuple):
    """A layout on a device; see `deepspeed.ops.sparse_attention.host_attention.RowLists`."""

    starts: Tensor  # [layouts, block rows + 1]
    columns: Tensor  # int32
    layout_of: Tensor  # [heads]
    longest: int  # most blocks in a row


class BlockLayout(NamedTuple):
    """A layout by rows and by columns, and the heads of each distinct layout."""

    rows: Lists
    columns: Lists
    members: list[Tensor]
    block: int


class Added(NamedTuple):
    """Terms added to the scores: ``keys`` [batch, tokens] and ``scores`` [tokens, tokens], which have no gradient, and
    ``positions`` [1 or batch, 1 or heads, tokens, tokens], which may have one. ``causal`` masks later tokens.
    """

    keys: Tensor | None = None
    scores: Tensor | None = None
    positions: Tensor | None = None
    causal: bool = False


class BlockSparseAttention(torch.autograd.Function):
    """Attention with inputs and output [batch, heads, tokens, size]."""

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
            keys=contiguous(added.keys), scores=contiguous(added.scores), positions=contiguous(positions)
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
        added, wanted = Added(*masks, causal), bool(ctx.needs_input_grad[3])
        found = backward(grads[0].contiguous(), (q, k, v), out, lse, layout, added, scale, wanted)
        return *found, None, None, None


@where_tensors_are
def forward(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, added: Added, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output, and log-sum-exp [batch, heads, tokens] in base 2."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    tile = forward_tile(q, power_of_two(layout.block))
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
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    added: Added,
    scale: float,
    positions_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and positions."""
    q, k, v = qkv
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
    delta = torch.empty_like(lse)
    tile = backward_tile(q, power_of_two(layout.block))
    sizes = (scale * LOG2E, q.shape[1], q.shape[2], q.shape[2] // layout.block)
    pointers = _pointers(added)
    constants = {**_constants(q, layout, added, tile), **tile.options}
    _query_gradient[_programs(q, layout, tile)](
        *(q, k, v, out, lse, grad, delta, grad_q, *layout.rows[:3], *pointers, *sizes), **constants
    )
    _key_gradients[_programs(q, layout, tile)](
        *(q, k, v, lse, grad, delta, grad_k, grad_v, *layout.columns[:3], *pointers, *sizes), **constants
    )
    grad_positions = None
    if positions_wanted and added.positions is not None:
        grad_positions = _sum_positions_gradient((q, k, v, lse, grad, delta), layout, added, scale, tile)
    return grad_q, grad_k, grad_v, grad_positions


def _sum_positions_gradient(
    tensors: tuple[Tensor, ...], layout: BlockLayout, added: Added, scale: float, tile: Tile
) -> Tensor:
    q, positions = tensors[0], added.positions
    assert positions is not None
    found = torch.zeros_like(positions, dtype=torch.float32)
    batch, heads, tokens, _ = q.shape
    by_batch, by_head = (dim > 1 for dim in positions.shape[:2])
    parts = max(1, -(-layout.rows.longest * layout.block // tile.columns))
    tiles = tokens // layout.block * -(-layout.block // tile.rows)
    # Sequential launches: heads with different layouts may share a plane.
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


def _programs(q: Tensor, layout: BlockLayout, tile: Tile) -> tuple[int]:
    blocks = q.shape[2] // layout.block
    return (q.shape[0] * q.shape[1] * blocks * -(-layout.block // tile.rows),)


def _pointers(added: Added) -> tuple[Any, ...]:
    """Return masks, positions and their strides."""
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
