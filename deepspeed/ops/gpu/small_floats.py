"""Encode and decode groups of small floating-point numbers (`deepspeed/ops/formats/small_floats.py`), a kernel each.

A program has one group. Codes are packed in cells: two of 4 bits or one of 8 in a byte, four of 6 or two of 12 in three
bytes. Except for stochastic rounding, results are bit-identical to the reference in PyTorch.
"""

# A kernel is Triton, not Python: the types of its arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.gpu.types import FLOATS

MAX_GROUP = 16384
_ROUNDER = tl.constexpr(1.5 * 2.0**23)  # adding it rounds a small number to an integer, to nearest even
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _power_of_two(exponent):
    """Return 2^exponent in fp32, for exponents of normal numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _code(x, random, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, CODES: tl.constexpr):
    """Return the codes (int32) of fp32 numbers; ``random`` in [0, 1), or None: nearest, ties to even."""
    bias: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    exponent = tl.maximum((magnitude >> 23) - 127, 1 - bias)
    steps = magnitude.to(tl.float32, bitcast=True) * _power_of_two(MANTISSA - exponent)
    if random is None:
        rounder = tl.full(steps.shape, _ROUNDER, tl.float32)
        whole = (steps + rounder).to(tl.int32, bitcast=True) - rounder.to(tl.int32, bitcast=True)
    else:
        whole = tl.floor(steps + random).to(tl.int32)
    code = ((exponent + (bias - 1)) << MANTISSA) + whole
    code = tl.minimum(tl.maximum(code, 0), CODES - 1)
    if EXPONENT + MANTISSA == 7:  # E4M3, the only format with a code for NaN
        code = tl.where(magnitude > 0x7F800000, CODES, code)
    return code | tl.where(bits < 0, 1 << (EXPONENT + MANTISSA), 0)


@triton.jit(do_not_specialize=["seed"])
def _encode_kernel(
    x,  # [numel]
    codes,  # [groups, stride] uint8
    scales,  # [groups] fp32
    numel,
    group,
    stride,
    seed,
    largest,
    STOCHASTIC: tl.constexpr,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    CODES: tl.constexpr,
    BYTES: tl.constexpr,  # of a cell
    CELLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    bits: tl.constexpr = 1 + EXPONENT + MANTISSA
    per: tl.constexpr = BYTES * 8 // bits
    cell = tl.arange(0, CELLS)
    there = cell * per < group
    top = tl.zeros((CELLS,), tl.int32)
    for number in tl.static_range(per):
        at = row * group + cell * per + number
        value = tl.load(x + at, mask=there & (at < numel), other=0.0).to(tl.float32)
        top = tl.maximum(top, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    most = tl.max(top, 0).to(tl.float32, bitcast=True)
    scale = tl.where(most > 0, tl.maximum(tl.div_rn(most, largest), _TINY), 1.0)
    word = tl.zeros((CELLS,), tl.int32)
    for number in tl.static_range(per):
        at = row * group + cell * per + number
        value = tl.load(x + at, mask=there & (at < numel), other=0.0).to(tl.float32)
        share = tl.div_rn(value, scale)
        random = tl.rand(seed, at.to(tl.int32)) if STOCHASTIC else None
        word |= _code(share, random, EXPONENT, MANTISSA, CODES) << (bits * number)
    for byte in tl.static_range(BYTES):
        place = codes + row * stride + cell * BYTES + byte
        tl.store(place, ((word >> (8 * byte)) & 255).to(tl.uint8), mask=there)
    tl.store(scales + row, scale)


@triton.jit
def _decode_kernel(
    codes,  # [groups, stride] uint8
    scales,  # [groups] fp32, or None: they follow the codes
    out,  # [numel]
    numel,
    group,
    stride,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    CODES: tl.constexpr,
    BYTES: tl.constexpr,
    CELLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    bits: tl.constexpr = 1 + EXPONENT + MANTISSA
    bias: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    per: tl.constexpr = BYTES * 8 // bits
    cell = tl.arange(0, CELLS)
    there = cell * per < group
    if scales is None:
        byte = tl.arange(0, 4)
        parts = tl.load(codes + row * stride + group * bits // 8 + byte).to(tl.int32) << (8 * byte)
        scale = tl.sum(parts, 0).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + row)
    word = tl.zeros((CELLS,), tl.int32)
    for byte in tl.static_range(BYTES):
        part = tl.load(codes + row * stride + cell * BYTES + byte, mask=there, other=0)
        word |= part.to(tl.int32) << (8 * byte)
    for number in tl.static_range(per):
        code = (word >> (bits * number)) & ((1 << bits) - 1)
        magnitude = code & ((1 << (bits - 1)) - 1)
        exponent = magnitude >> MANTISSA
        fraction = magnitude & ((1 << MANTISSA) - 1)
        whole = fraction + tl.where(exponent > 0, 1 << MANTISSA, 0)
        value = whole.to(tl.float32) * _power_of_two(tl.maximum(exponent, 1) - bias - MANTISSA)
        value = tl.where(magnitude >= CODES, float("nan"), value)
        value = tl.where(code >> (bits - 1) != 0, -value, value) * scale
        at = row * group + cell * per + number
        tl.store(out + at, value.to(out.dtype.element_ty), mask=there & (at < numel))


def supports(tensor: Tensor, group: int) -> bool:
    """Return whether there is a kernel for values of this type, in groups of this size."""
    return tensor.dtype in FLOATS and group <= MAX_GROUP


def encode(
    x: Tensor, group: int, exponent: int, mantissa: int, codes: int, largest: float, *, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Return codes, uint8 [groups, bytes of a group], and scales, fp32 [groups, 1]. ``seed``: of stochastic rounding;
    None: to nearest."""
    bits = 1 + exponent + mantissa
    groups, width = triton.cdiv(x.numel(), group), group * bits // 8
    packed = torch.empty(groups, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(groups, 1, dtype=torch.float32, device=x.device)
    if groups:
        with torch.cuda.device_of(x):
            _encode_kernel[(groups,)](
                x.contiguous(),
                packed,
                scales,
                x.numel(),
                group,
                packed.shape[1],
                seed or 0,
                largest,
                STOCHASTIC=seed is not None,
                **_format(group, exponent, mantissa, codes),
            )
    return packed, scales


def decode(
    packed: Tensor, scales: Tensor | None, out: Tensor, group: int, exponent: int, mantissa: int, codes: int
) -> None:
    """Decode ``packed`` into ``out``, which is contiguous. ``scales`` None: they follow the codes of each group.

    ValueError: too few bytes or scales for ``out``.
    """
    groups = triton.cdiv(out.numel(), group)
    stride = group * (1 + exponent + mantissa) // 8 + (4 if scales is None else 0)
    if packed.numel() < groups * stride or (scales is not None and scales.numel() < groups):
        raise ValueError(
            f"{groups} groups of {group} numbers need {groups * stride} bytes and {groups} scales, not "
            f"{packed.numel()} bytes{'' if scales is None else f' and {scales.numel()} scales'}"
        )
    if groups:
        with torch.cuda.device_of(out):
            _decode_kernel[(groups,)](
                packed.contiguous().view(torch.uint8),
                None if scales is None else scales.contiguous(),
                out,
                out.numel(),
                group,
                stride,
                **_format(group, exponent, mantissa, codes),
            )


def _format(group: int, exponent: int, mantissa: int, codes: int) -> dict[str, Any]:
    bits = 1 + exponent + mantissa
    cell = 1 if bits in (4, 8) else 3
    return {
        "EXPONENT": exponent,
        "MANTISSA": mantissa,
        "CODES": codes,
        "BYTES": cell,
        "CELLS": triton.next_power_of_2(group * bits // 8 // cell),
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
