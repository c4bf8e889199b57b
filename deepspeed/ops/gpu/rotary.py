"""Rotary embedding of queries and keys, and the write of keys and values to the paged cache."""

# Kernels are Triton, not Python: the types of their arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.gpu.types import FLOATS


@triton.jit
def _store_value(source, target, size, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    value = tl.load(source + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(target + column, value.to(target.dtype.element_ty), mask=column < size)


@triton.jit
def _rotated(
    at,  # a query or key head
    weight,  # [size] of its norm, or None
    cosines,  # [pairs] at the row's position
    sines,
    size,
    pairs,
    eps,
    BLOCK: tl.constexpr,
):
    """Return a head after its norm and rotation, fp32 [BLOCK], and write it in place."""
    column = tl.arange(0, BLOCK)
    inside, is_rotated = column < size, column < 2 * pairs
    is_first = column < pairs
    pair = tl.where(is_first, column, column - pairs)
    other = tl.where(is_first, column + pairs, column - pairs)
    other = tl.where(is_rotated, other, column)
    x = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(at + other, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
        x = x * factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        y = y * factor * tl.load(weight + other, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + pair, mask=is_rotated & inside, other=1.0)
    sine = tl.load(sines + pair, mask=is_rotated & inside, other=0.0)
    result = tl.where(is_first, x * cosine - y * sine, x * cosine + y * sine)
    tl.debug_barrier()  # each element of a pair is also read by the thread of the other one
    tl.store(at + column, result.to(at.dtype.element_ty), mask=inside)
    return result


@triton.jit
def _rotary_kernel(
    projected,  # [rows, query heads, key heads, value heads]
    cosines,  # [positions, pairs] fp32
    sines,
    positions,  # [rows] int64
    blocks,  # [rows] int64: where to store keys and values of a row
    offsets,  # [rows] int64
    keys,  # [blocks, kv_heads, key_size, block_size]
    values,  # [blocks, kv_heads, block_size, value_size]
    query_weight,  # [key_size], or None: norms of heads
    key_weight,
    width,
    heads,
    kv_heads,
    key_size,
    value_size,
    block_size,
    pairs,
    eps,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    start = projected + row * width
    block, offset = tl.load(blocks + row), tl.load(offsets + row)
    angle = tl.load(positions + row) * pairs
    if head < heads:
        at = start + head * key_size
        _rotated(at, query_weight, cosines + angle, sines + angle, key_size, pairs, eps, KEY)
    elif head < heads + kv_heads:
        key_at = start + head * key_size
        key = _rotated(key_at, key_weight, cosines + angle, sines + angle, key_size, pairs, eps, KEY)
        column = tl.arange(0, KEY)
        place = ((block * kv_heads + head - heads) * key_size + column) * block_size + offset
        tl.store(keys + place, key.to(keys.dtype.element_ty), mask=column < key_size)
    else:
        number = head - heads - kv_heads
        source = start + (heads + kv_heads) * key_size + number * value_size
        target = values + ((block * kv_heads + number) * block_size + offset) * value_size
        _store_value(source, target, value_size, VALUE)


def supports(*tensors: Tensor | None) -> bool:
    """Return whether there is a kernel for these dtypes."""
    return all(tensor is None or tensor.dtype in FLOATS for tensor in tensors)


def rotate_and_store(
    projected: Tensor,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    *,
    heads: int,
    weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate the queries and keys in rows of ``projected`` [rows, (heads + kv heads) * key size + kv heads * value
    size] in place, and store keys and values in ``pages``.

    Args:
        tables: cosines and sines [positions, pairs] in fp32.
        positions: int64 [rows].
        slots: blocks and offsets, int64 [rows].
        pages: keys [blocks, kv heads, key size, block size], values [.., block size, value size].
        weights: of norms of each query and key head, applied before the rotation.
    """
    rows, width = projected.shape
    keys, values = pages
    _, kv_heads, key_size, block_size = keys.shape
    query_weight, key_weight = weights or (None, None)
    with torch.cuda.device_of(projected):
        _rotary_kernel[(rows, heads + 2 * kv_heads)](
            projected,
            *tables,
            positions,
            *slots,
            keys,
            values,
            query_weight,
            key_weight,
            width,
            heads,
            kv_heads,
            key_size,
            values.shape[3],
            block_size,
            tables[0].shape[1],
            eps,
            KEY=triton.next_power_of_2(key_size),
            VALUE=triton.next_power_of_2(values.shape[3]),
            num_warps=1,
        )
