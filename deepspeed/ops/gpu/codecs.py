"""Payloads of signs and of small integers (`deepspeed/ops/formats/codecs.py`), encoded and decoded in one pass.

A program processes one block of one row: it reads the block once, computes its scale, and writes codes and encoding
errors. Everything is IEEE arithmetic without fused multiply-adds, so integers have the same bits as those of the host's
kernel. The mean of a block of signs is a sum in fp64, in another order than on the host: very rarely, it differs in the
last bit of fp32.
"""

# Kernels are Triton, not Python: the types of their arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.gpu.dropout import mixed, signed
from deepspeed.ops.gpu.types import FLOATS

_ROUNDER = tl.constexpr(1.5 * 2.0**23)  # adding it rounds a small number to an integer, to nearest even
MAX_BLOCK = 8192


@triton.jit
def _wanted(values, errors, at, inside):
    """Return values as fp32, with the error feedback added."""
    x = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    if errors is not None:
        x = x + tl.load(errors + at, mask=inside, other=0.0)
    return x


@triton.jit
def _code(x, divisor, part, MAX_CODE: tl.constexpr):
    """Return int32 codes: quotients plus ``part``, rounded to nearest; 0 in a block with non-finite values."""
    q = tl.div_rn(x, divisor)
    q = tl.where(q > MAX_CODE, MAX_CODE, q)
    q = tl.where(q < -MAX_CODE, -MAX_CODE, q)
    q = tl.where(q == q, q, 0.0)
    if part is not None:
        q = q + part
    rounder = tl.full(q.shape, _ROUNDER, tl.float32)
    return (q + rounder).to(tl.int32, bitcast=True) - rounder.to(tl.int32, bitcast=True)


@triton.jit
def _largest_bits(x):
    """Return the bits of the largest magnitude: those of a NaN if there is one, as they compare larger than
    infinity."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def _part(key, element):
    """Return a random number between -1/2 and 1/2 for each element."""
    word = mixed(key + element.to(tl.uint32)) >> 15
    return (word | 1).to(tl.int32).to(tl.float32) * (1.0 / 131072.0) - 0.5


@triton.jit
def _finish(payloads, stride, used, is_last):
    """Write zeros after the last code, so that the payload does not depend on previous memory contents."""
    tail = used + tl.arange(0, 4)
    tl.store(payloads + tail, tl.zeros((4,), tl.uint8), mask=tail < tl.where(is_last, stride, 0))


@triton.jit(do_not_specialize=["stride", "blocks", "seed"])
def _encode_integers_kernel(
    payloads,  # [rows, stride] uint8
    scales,  # the same memory as fp32
    values,  # [rows, numel]
    errors,  # [rows, numel] fp32, or None
    numel,
    stride,
    block,
    blocks,
    seed,
    RANDOM: tl.constexpr,
    MAX_CODE: tl.constexpr,
    HALF: tl.constexpr,  # a power of 2, at least half a block
    IN_HALVES: tl.constexpr,  # whether two codes share a byte
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    index = (tl.program_id(0) % blocks).to(tl.int64)
    begin = index * block
    count = tl.minimum(numel - begin, block)
    pair = tl.arange(0, HALF)
    first = row * numel + begin
    has_low, has_high = 2 * pair < count, 2 * pair + 1 < count
    low = _wanted(values, errors, first + 2 * pair, has_low)
    high = _wanted(values, errors, first + 2 * pair + 1, has_high)
    largest = tl.maximum(_largest_bits(low), _largest_bits(high))
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), MAX_CODE)
    divisor = tl.where(scale > 0, scale, 1.0)
    tl.store(scales + row * (stride // 4) + index, scale)
    low_part, high_part = None, None
    if RANDOM:
        bits = tl.sum(low.to(tl.int32, bitcast=True) + high.to(tl.int32, bitcast=True), 0)
        number = mixed(tl.program_id(0).to(tl.uint32) + mixed(seed.to(tl.uint32)))
        key = mixed(bits.to(tl.uint32, bitcast=True) + number)
        low_part, high_part = _part(key, 2 * pair), _part(key, 2 * pair + 1)
    low_code, high_code = _code(low, divisor, low_part, MAX_CODE), _code(high, divisor, high_part, MAX_CODE)
    payload = payloads + row * stride
    codes = payload + 4 * blocks
    if IN_HALVES:
        both = (low_code & 15) | tl.where(has_high, (high_code & 15) << 4, 0)
        tl.store(codes + begin // 2 + pair, both.to(tl.uint8), mask=has_low)
        used = 4 * blocks + (numel + 1) // 2
    else:
        tl.store(codes + begin + 2 * pair, (low_code & 255).to(tl.uint8), mask=has_low)
        tl.store(codes + begin + 2 * pair + 1, (high_code & 255).to(tl.uint8), mask=has_high)
        used = 4 * blocks + numel
    _finish(payload, stride, used, index == blocks - 1)
    if errors is not None:
        tl.store(errors + first + 2 * pair, low - low_code.to(tl.float32) * scale, mask=has_low)
        tl.store(errors + first + 2 * pair + 1, high - high_code.to(tl.float32) * scale, mask=has_high)


@triton.jit(do_not_specialize=["stride", "blocks"])
def _encode_signs_kernel(
    payloads,
    scales,
    values,
    errors,
    numel,
    stride,
    block,
    blocks,
    BYTES: tl.constexpr,  # a power of 2, at least an eighth of a block
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    index = (tl.program_id(0) % blocks).to(tl.int64)
    begin = index * block
    count = tl.minimum(numel - begin, block)
    byte, bit = tl.arange(0, BYTES), tl.arange(0, 8)
    element = 8 * byte[:, None] + bit[None, :]
    inside = element < count
    at = row * numel + begin + element
    x = _wanted(values, errors, at, inside)
    total = tl.sum(tl.sum(tl.abs(x).to(tl.float64), 1), 0)
    mean = (total / count.to(tl.float64)).to(tl.float32)
    tl.store(scales + row * (stride // 4) + index, mean)
    payload = payloads + row * stride
    bits = tl.sum(((x >= 0) & inside).to(tl.int32) << bit[None, :], 1)
    tl.store(payload + 4 * blocks + begin // 8 + byte, bits.to(tl.uint8), mask=8 * byte < count)
    _finish(payload, stride, 4 * blocks + (numel + 7) // 8, index == blocks - 1)
    if errors is not None:
        tl.store(errors + at, x - tl.where(x >= 0, mean, -mean), mask=inside)


@triton.jit(do_not_specialize=["rows", "stride", "blocks"])
def _decode_kernel(
    payloads,  # [rows, stride] uint8
    scales,  # the same memory as fp32
    values,  # [rows, numel], or [numel]: the sum of all rows
    rows,
    numel,
    stride,
    block,
    blocks,
    BITS: tl.constexpr,
    TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = (tl.program_id(0) % blocks).to(tl.int64)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    begin = index * block
    each = tl.arange(0, BLOCK)
    inside = each < tl.minimum(numel - begin, block)
    element = begin + each
    result = tl.zeros((BLOCK,), tl.float32)
    steps = 1
    if TOTAL:
        steps = rows
    for step in range(steps):
        payload = payloads + (row + step) * stride
        scale = tl.load(scales + (row + step) * (stride // 4) + index)
        byte = tl.load(payload + 4 * blocks + element * BITS // 8, mask=inside, other=0).to(tl.int32)
        if BITS == 1:
            found = tl.where((byte >> (element % 8)) & 1 != 0, scale, -scale)
        elif BITS == 4:
            found = ((((byte >> (4 * (element % 2))) & 15) ^ 8) - 8).to(tl.float32) * scale
        else:
            found = ((byte ^ 128) - 128).to(tl.float32) * scale
        result = result + found if TOTAL else found
    tl.store(values + row * numel + element, result.to(values.dtype.element_ty), mask=inside)


CODES = (1, 4, 8)
"""Signs and integers of 4 and 8 bits; 8-bit floats have no kernel here."""


def supports(payloads: Tensor, values: Tensor, block: int) -> bool:
    """Return whether there is a kernel for payload and values of these dtypes and sizes."""
    whole = payloads.is_contiguous() and payloads.storage_offset() % 4 == 0 and payloads.shape[-1] % 4 == 0
    return whole and values.is_contiguous() and values.dtype in FLOATS and block <= MAX_BLOCK


def encode(
    payloads: Tensor,
    values: Tensor,
    bits: int,
    block: int,
    errors: Tensor | None = None,
    seed: int | None = None,
) -> None:
    """Encode ``values`` [.., n] plus ``errors`` (fp32) into ``payloads`` [.., bytes], and set ``errors`` to the
    encoding error. With a ``seed``, integers are rounded stochastically."""
    numel, stride = values.shape[-1], payloads.shape[-1]
    if not values.numel():
        payloads.zero_()
        return
    blocks = triton.cdiv(numel, block)
    arguments = (payloads, payloads.view(torch.float32), values, errors, numel, stride, block, blocks)
    grid = (values.numel() // numel * blocks,)
    with torch.cuda.device_of(values):
        if bits == 1:
            tile = triton.next_power_of_2(triton.cdiv(block, 8))
            _encode_signs_kernel[grid](*arguments, BYTES=tile, num_warps=4, enable_fp_fusion=False)
        else:
            _encode_integers_kernel[grid](
                *arguments,
                signed(seed or 0),
                RANDOM=seed is not None,
                MAX_CODE=float(2 ** (bits - 1) - 1),
                HALF=triton.next_power_of_2(triton.cdiv(block, 2)),
                IN_HALVES=bits == 4,
                num_warps=1 if block <= 512 else 4,
                enable_fp_fusion=False,
            )


def decode(payloads: Tensor, values: Tensor, bits: int, block: int, *, total: bool = False) -> None:
    """Decode ``payloads`` [.., bytes] into ``values`` [.., n]; ``total``: into their sum [n], added in order."""
    numel, stride = values.shape[-1], payloads.shape[-1]
    if not values.numel():
        return
    rows, blocks = payloads.numel() // stride, triton.cdiv(numel, block)
    with torch.cuda.device_of(values):
        _decode_kernel[(blocks if total else rows * blocks,)](
            payloads,
            payloads.view(torch.float32),
            values,
            rows,
            numel,
            stride,
            block,
            blocks,
            BITS=bits,
            TOTAL=total,
            BLOCK=triton.next_power_of_2(block),
            num_warps=1 if block <= 512 else 4,
            enable_fp_fusion=False,
        )
