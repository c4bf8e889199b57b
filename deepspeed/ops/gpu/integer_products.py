"""Products with weights of 8 or 4 bits, which are dequantized between memory and the matrix units.

Words have the layout of `deepspeed.ops.small_product.QuantizedMatrix`: element n of word i in a run of 16 words is
column 16 n + i of the run. A tile of words is read once, and yields 4 or 8 tiles of weights, one per position in a
word, each multiplied by its columns of the input.
"""

# Kernels are Triton, not Python: the types of their arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.gpu.types import FLOATS, operand_type, product_precision


@triton.jit(do_not_specialize=["rows"])
def _weights_kernel(
    x,  # [rows, columns]
    words,  # [outputs, width] int32
    scales,  # [outputs, groups] fp32
    bias,  # [outputs], or None
    out,  # [rows, outputs]
    rows,
    outputs,
    columns,
    width,
    groups,
    group,  # columns per scale
    BITS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_output = output < outputs
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, width, WORDS):
        word = first + tl.arange(0, WORDS)
        inside = is_output[:, None] & (word < width)[None, :]
        packed = tl.load(words + output[:, None] * width + word[None, :], mask=inside, other=0)
        start = word // 16 * (512 // BITS) + word % 16  # column of a word's first element
        at = output[:, None] * groups + (start // group)[None, :]
        scale = tl.load(scales + at, mask=inside, other=0.0)
        for number in tl.static_range(32 // BITS):
            column = start + 16 * number
            there = (row < rows) & (column < columns)[None, :]
            values = tl.load(x + row * columns + column[None, :], mask=there, other=0.0)
            whole = (packed << (32 - BITS * (number + 1))) >> (32 - BITS)
            weight = (whole.to(tl.float32) * scale).to(x.dtype.element_ty)
            total = tl.dot(values.to(OPERAND), tl.trans(weight.to(OPERAND)), total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place = out + row * outputs + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < rows) & is_output[None, :])


@triton.jit(do_not_specialize=["rows"])
def _integers_kernel(
    x,  # [rows, columns] int8
    x_scales,  # [rows] fp32
    words,  # [outputs, width] int32
    scales,  # [outputs, groups] fp32
    bias,  # [outputs], or None
    out,  # [rows, outputs]
    rows,
    outputs,
    columns,
    width,
    groups,
    group_words,  # words per scale
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WORDS: tl.constexpr,  # divides the words of a group
):
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_output = output < outputs
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, width, WORDS):
        word = first + tl.arange(0, WORDS)
        inside = is_output[:, None] & (word < width)[None, :]
        packed = tl.load(words + output[:, None] * width + word[None, :], mask=inside, other=0)
        start = word // 16 * (512 // BITS) + word % 16
        whole = tl.zeros((ROWS, OUTPUTS), tl.int32)
        for number in tl.static_range(32 // BITS):
            column = start + 16 * number
            there = (row < rows) & (column < columns)[None, :]
            values = tl.load(x + row * columns + column[None, :], mask=there, other=0)
            weight = ((packed << (32 - BITS * (number + 1))) >> (32 - BITS)).to(tl.int8)
            whole = tl.dot(values, tl.trans(weight), whole, out_dtype=tl.int32)
        scale = tl.load(scales + output * groups + first // group_words, mask=is_output, other=0.0)
        total += whole.to(tl.float32) * scale[None, :]
    total *= tl.load(x_scales + row, mask=row < rows, other=0.0)
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place = out + row * outputs + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < rows) & is_output[None, :])


def supports(input: Tensor, bias: Tensor | None) -> bool:
    """Return whether there is a kernel for these dtypes."""
    return input.dtype in FLOATS and (bias is None or bias.dtype in FLOATS)


def product(
    input: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, *, bits: int, columns: int
) -> Tensor:
    """Multiply ``input`` [.., columns] by the matrix of `QuantizedMatrix`'s ``words`` and ``scales``. Returns [..,
    outputs] in the dtype of the input, to which weights are rounded; sums are fp32."""
    outputs, width = words.shape
    rows = input.numel() // columns
    out = input.new_empty(*input.shape[:-1], outputs)
    bias = None if bias is None else bias.contiguous()
    few = rows <= 16
    tile = {"ROWS": 16 if few else 64, "OUTPUTS": 32 if few else 64, "WORDS": 64 if few else 32}
    grid = (triton.cdiv(outputs, tile["OUTPUTS"]), triton.cdiv(rows, tile["ROWS"]))
    with torch.cuda.device_of(input):
        _weights_kernel[grid](
            input.contiguous(),
            words.contiguous(),
            scales.contiguous(),
            bias,
            out,
            rows,
            outputs,
            columns,
            width,
            scales.shape[1],
            width * (32 // bits) // scales.shape[1],
            BITS=bits,
            OPERAND=operand_type(input.dtype),
            PRECISION=product_precision(),
            num_warps=4,
            **tile,
        )
    return out


_WORDS = 32
"""Words per tile of integers: matrix units multiply 32 8-bit elements at a time."""


def supports_integers(bits: int, scales: Tensor, group: int) -> bool:
    """Return whether a tile of words has a single scale, so that integers can be summed before they are scaled."""
    return scales.shape[1] == 1 or group * bits // 32 % _WORDS == 0


def product_of_integers(
    whole: Tensor,
    x_scales: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    *,
    bits: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply int8 [.., columns], with scales ``x_scales`` [.., 1], by a matrix. Returns [.., outputs] in ``dtype``.
    Sums within a group are exact."""
    outputs, width = words.shape
    rows = whole.numel() // columns
    bias = None if bias is None else bias.contiguous()
    out = torch.empty(*whole.shape[:-1], outputs, dtype=dtype, device=whole.device)
    tile = {"ROWS": 16 if rows <= 16 else 64, "OUTPUTS": 32 if rows <= 16 else 64, "WORDS": _WORDS}
    grid = (triton.cdiv(outputs, tile["OUTPUTS"]), triton.cdiv(rows, tile["ROWS"]))
    with torch.cuda.device_of(whole):
        _integers_kernel[grid](
            whole.contiguous(),
            x_scales.contiguous(),
            words.contiguous(),
            scales.contiguous(),
            bias,
            out,
            rows,
            outputs,
            columns,
            width,
            scales.shape[1],
            width // scales.shape[1],
            BITS=bits,
            num_warps=4,
            **tile,
        )
    return out
