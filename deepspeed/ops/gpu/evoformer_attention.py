"""Evoformer attention in Triton, forward and backward, with both biases.

The first bias is per key of a sequence (shared by heads and queries), the second per pair of tokens and head (shared by
sequences). There are no atomics: the first one's gradient comes from the kernel over keys, per head, and the second has
a kernel that sums over all sequences of a pair.

Not yet run on a GPU: compiled for sm_80, sm_89, sm_90 and sm_100 and run in Triton's interpreter.
"""

# A kernel is Triton, not Python: its argument types mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.gpu.softmax_steps import (
    LOG2E,
    Tile,
    backward_tile,
    biased,
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


@triton.jit
def _offsets(rows, keys, sequence, head, heads, size: tl.constexpr):
    """Return the offsets of one head of one sequence in the queries [sequences, rows, heads, size] and in the keys."""
    sequence_offset = sequence.to(tl.int64) * heads * size
    return sequence_offset * rows + head * size, sequence_offset * keys + head * size


@triton.jit
def _loaded(pointer, token, tokens, heads, size: tl.constexpr, SIZE: tl.constexpr):
    """Load [tokens, size] of one head; zeros outside."""
    number = tl.arange(0, SIZE)
    place = token.to(tl.int64)[:, None] * heads * size + number[None, :]
    return tl.load(pointer + place, mask=(token < tokens)[:, None] & (number < size)[None, :], other=0.0)


@triton.jit
def _stored(pointer, found, token, tokens, heads, size: tl.constexpr, SIZE: tl.constexpr):
    number = tl.arange(0, SIZE)
    place = token.to(tl.int64)[:, None] * heads * size + number[None, :]
    mask = (token < tokens)[:, None] & (number < size)[None, :]
    tl.store(pointer + place, found.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _place(tokens, ROWS: tl.constexpr, heads):
    """Return a program's sequence and head, and its tokens."""
    tiles = tl.cdiv(tokens, ROWS)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    return tl.program_id(0) // tiles // heads, tl.program_id(0) // tiles % heads, row


@triton.jit
def _scores(q, k, row, key, rows, keys, scale, key_bias, pair_bias, BY_KEYS: tl.constexpr):
    """Return scores with the biases of a sequence and a plane of pairs: [rows, keys], transposed if ``BY_KEYS``."""
    if BY_KEYS:
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        row, key = row[None, :], key[:, None]
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        row, key = row[:, None], key[None, :]
    seen = (row < rows) & (key < keys)
    scores = biased(scores, key_bias, key, key < keys)
    scores = biased(scores, pair_bias, row.to(tl.int64) * keys + key, seen)
    return tl.where(seen, scores, float("-inf"))


@triton.jit(do_not_specialize=["sequences"])
def _forward(
    query,
    key,
    value,
    output,
    lse,
    key_bias,
    pair_bias,
    scale,  # times log2(e)
    sequences,  # per batch element
    heads,
    rows,
    keys,
    size: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
):
    sequence, head, row = _place(rows, ROWS, heads)
    if key_bias is not None:
        key_bias += sequence.to(tl.int64) * keys
    if pair_bias is not None:
        pair_bias += ((sequence // sequences).to(tl.int64) * heads + head) * rows * keys
    query_offset, key_offset = _offsets(rows, keys, sequence, head, heads, size)
    q = _loaded(query + query_offset, row, rows, heads, size, SIZE).to(DOT)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(0, keys, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k = _loaded(key + key_offset, column, keys, heads, size, SIZE).to(DOT)
        scores = _scores(q, k, row, column, rows, keys, scale, key_bias, pair_bias, False)
        v = _loaded(value + key_offset, column, keys, heads, size, SIZE).to(DOT)
        top, total, out = joined(top, total, out, scores, v, DOT)
    out, row_lse = finished(top, total, out)
    place = (sequence.to(tl.int64) * heads + head) * rows + row
    tl.store(lse + place, row_lse / _LOG2E, mask=row < rows)
    _stored(output + query_offset, out, row, rows, heads, size, SIZE)


@triton.jit(do_not_specialize=["sequences"])
def _query_gradient(
    query,
    key,
    value,
    output,
    lse,
    grad,
    delta,
    grad_query,
    key_bias,
    pair_bias,
    scale,
    sequences,
    heads,
    rows,
    keys,
    size: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute by rows. Also stores ``delta``, the row sums of output times its gradient, for the other kernels."""
    sequence, head, row = _place(rows, ROWS, heads)
    if key_bias is not None:
        key_bias += sequence.to(tl.int64) * keys
    if pair_bias is not None:
        pair_bias += ((sequence // sequences).to(tl.int64) * heads + head) * rows * keys
    query_offset, key_offset = _offsets(rows, keys, sequence, head, heads, size)
    q = _loaded(query + query_offset, row, rows, heads, size, SIZE).to(DOT)
    grad_out = _loaded(grad + query_offset, row, rows, heads, size, SIZE)
    out = _loaded(output + query_offset, row, rows, heads, size, SIZE)
    row_delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    grad_out = grad_out.to(DOT)
    place = (sequence.to(tl.int64) * heads + head) * rows + row
    tl.store(delta + place, row_delta, mask=row < rows)
    normal = finite(tl.load(lse + place, mask=row < rows, other=0.0)) * _LOG2E
    grad_q = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(0, keys, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k = _loaded(key + key_offset, column, keys, heads, size, SIZE).to(DOT)
        scores = _scores(q, k, row, column, rows, keys, scale, key_bias, pair_bias, False)
        v = _loaded(value + key_offset, column, keys, heads, size, SIZE).to(DOT)
        grad_scores = scores_gradient(tl.exp2(scores - normal[:, None]), grad_out, v, row_delta[:, None])
        grad_q += tl.dot(grad_scores.to(DOT), k, input_precision="ieee")
    _stored(grad_query + query_offset, grad_q * (scale / _LOG2E), row, rows, heads, size, SIZE)


@triton.jit(do_not_specialize=["sequences"])
def _key_gradients(
    query,
    key,
    value,
    lse,
    grad,
    delta,
    grad_key,
    grad_value,
    grad_key_bias,  # [sequences, heads, keys] fp32, or None
    key_bias,
    pair_bias,
    scale,
    sequences,
    heads,
    rows,
    keys,
    size: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute by keys: a program has ``ROWS`` of them, and takes the queries ``COLUMNS`` at a time."""
    sequence, head, column = _place(keys, ROWS, heads)
    if key_bias is not None:
        key_bias += sequence.to(tl.int64) * keys
    if pair_bias is not None:
        pair_bias += ((sequence // sequences).to(tl.int64) * heads + head) * rows * keys
    query_offset, key_offset = _offsets(rows, keys, sequence, head, heads, size)
    k = _loaded(key + key_offset, column, keys, heads, size, SIZE).to(DOT)
    v = _loaded(value + key_offset, column, keys, heads, size, SIZE).to(DOT)
    grad_k = tl.zeros([ROWS, SIZE], tl.float32)
    grad_v = tl.zeros([ROWS, SIZE], tl.float32)
    bias_sums = tl.zeros([ROWS], tl.float32)
    for start in range(0, rows, COLUMNS):
        row = start + tl.arange(0, COLUMNS)
        q = _loaded(query + query_offset, row, rows, heads, size, SIZE).to(DOT)
        scores = _scores(q, k, row, column, rows, keys, scale, key_bias, pair_bias, True)
        place = (sequence.to(tl.int64) * heads + head) * rows + row
        normal = finite(tl.load(lse + place, mask=row < rows, other=0.0)) * _LOG2E
        weights = tl.exp2(scores - normal[None, :])
        grad_out = _loaded(grad + query_offset, row, rows, heads, size, SIZE).to(DOT)
        grad_v += tl.dot(weights.to(DOT), grad_out, input_precision="ieee")
        row_delta = tl.load(delta + place, mask=row < rows, other=0.0)
        grad_scores = scores_gradient(weights, v, grad_out, row_delta[None, :])
        grad_k += tl.dot(grad_scores.to(DOT), q, input_precision="ieee")
        if grad_key_bias is not None:
            bias_sums += tl.sum(grad_scores, 1)
    _stored(grad_key + key_offset, grad_k * (scale / _LOG2E), column, keys, heads, size, SIZE)
    _stored(grad_value + key_offset, grad_v, column, keys, heads, size, SIZE)
    if grad_key_bias is not None:
        place = (sequence.to(tl.int64) * heads + head) * keys + column
        tl.store(grad_key_bias + place, bias_sums, mask=column < keys)


@triton.jit(do_not_specialize=["sequences"])
def _pairs_gradient(
    query,
    key,
    value,
    lse,
    grad,
    delta,
    grad_pair_bias,  # fp32, accumulated into
    key_bias,
    pair_bias,
    scale,
    sequences,
    heads,
    rows,
    keys,
    size: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Sum the gradient of a tile of queries and keys of one head over the sequences of one batch element."""
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(keys, COLUMNS)
    tile, plane = (
        tl.program_id(0) % (row_tiles * column_tiles),
        tl.program_id(0) // (row_tiles * column_tiles),
    )
    row = tile // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    head, first = plane % heads, plane // heads * sequences
    if pair_bias is not None:
        pair_bias += plane.to(tl.int64) * rows * keys
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for number in range(sequences):
        sequence = first + number
        sequence_bias = key_bias
        if key_bias is not None:
            sequence_bias = key_bias + sequence.to(tl.int64) * keys
        query_offset, key_offset = _offsets(rows, keys, sequence, head, heads, size)
        q = _loaded(query + query_offset, row, rows, heads, size, SIZE).to(DOT)
        k = _loaded(key + key_offset, column, keys, heads, size, SIZE).to(DOT)
        scores = _scores(q, k, row, column, rows, keys, scale, sequence_bias, pair_bias, False)
        place = (sequence.to(tl.int64) * heads + head) * rows + row
        normal = finite(tl.load(lse + place, mask=row < rows, other=0.0)) * _LOG2E
        row_delta = tl.load(delta + place, mask=row < rows, other=0.0)
        grad_out = _loaded(grad + query_offset, row, rows, heads, size, SIZE).to(DOT)
        v = _loaded(value + key_offset, column, keys, heads, size, SIZE).to(DOT)
        found += scores_gradient(tl.exp2(scores - normal[:, None]), grad_out, v, row_delta[:, None])
    place = (plane.to(tl.int64) * rows + row)[:, None] * keys + column[None, :]
    mask = (row < rows)[:, None] & (column < keys)[None, :]
    tl.store(grad_pair_bias + place, tl.load(grad_pair_bias + place, mask=mask, other=0.0) + found, mask=mask)


@where_tensors_are
def forward(
    q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None, pair_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return output, and log-sum-exp [batch, sequences, heads, queries]. Shapes as in `DS4Sci_EvoformerAttention`."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = torch.empty_like(q)
    lse = q.new_empty((*q.shape[:2], q.shape[3], q.shape[2]), dtype=torch.float32)
    tile = forward_tile(q)
    _forward[_programs(q, q.shape[2], tile)](
        *(q, k, v, out, lse, contiguous(key_bias), contiguous(pair_bias)),
        *_sizes(q, k),
        **_constants(q, tile),
        **tile.options,
    )
    return out, lse


@where_tensors_are
def backward(
    grad: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    bias_grads: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs' gradients; those of the biases are accumulated into ``bias_grads``, in fp32."""
    grad, q, k, v, out, lse = (x.contiguous() for x in (grad, *qkv, out, lse))
    grad_key_bias, grad_pair_bias = bias_grads
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    delta = torch.empty_like(lse)
    tile = backward_tile(q)
    rest = (*map(contiguous, biases), *_sizes(q, k))
    constants = {**_constants(q, tile), **tile.options}
    _query_gradient[_programs(q, q.shape[2], tile)](*(q, k, v, out, lse, grad, delta, dq), *rest, **constants)
    by_head = None
    if grad_key_bias is not None:
        by_head = lse.new_empty((*lse.shape[:3], k.shape[2]))
    _key_gradients[_programs(q, k.shape[2], tile)](
        *(q, k, v, lse, grad, delta, dk, dv, by_head), *rest, **constants
    )
    if grad_key_bias is not None and by_head is not None:
        grad_key_bias += by_head.sum(2)[:, :, None, None]
    if grad_pair_bias is not None:
        sums = grad_pair_bias.contiguous()
        tiles = triton.cdiv(q.shape[2], tile.rows) * triton.cdiv(k.shape[2], tile.columns)
        _pairs_gradient[(q.shape[0] * q.shape[3] * tiles,)](
            *(q, k, v, lse, grad, delta, sums), *rest, **constants
        )
        if sums is not grad_pair_bias:
            grad_pair_bias.copy_(sums)
    return dq, dk, dv


def _programs(q: Tensor, tokens: int, tile: Tile) -> tuple[int]:
    return (q.shape[0] * q.shape[1] * q.shape[3] * -(-tokens // tile.rows),)


def _sizes(q: Tensor, k: Tensor) -> tuple[float | int, ...]:
    return q.shape[-1] ** -0.5 * LOG2E, q.shape[1], q.shape[3], q.shape[2], k.shape[2]


def _constants(q: Tensor, tile: Tile) -> dict[str, Any]:
    size = q.shape[-1]
    return {
        "size": size,
        "SIZE": power_of_two(size),
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DOT": operand_type(q.dtype),
    }
