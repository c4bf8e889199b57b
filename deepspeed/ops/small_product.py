"""Products of a few rows with a matrix of weights that is read once: bfloat16, or integers with scales."""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.ops.native import library

__all__ = ["QuantizedMatrix", "Weights", "product", "quantized_product", "takes_bfloat16"]

CALL_ROWS = 8
"""Rows that one call takes."""
MOST_ROWS = 64
"""From here on it is cheaper to make the values of integer weights than to read the weights once for every 8 rows."""
LANES = 16
RUNS = {8: 64, 4: 128}
"""Columns that lie together, by the bits of an integer: groups are multiples of it."""


class Weights(enum.IntEnum):
    """How a matrix is stored."""

    BFLOAT16 = 0
    INT8 = 1
    INT4 = 2


class _Product(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("output", "input", "matrix", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "outputs", "columns", "row_bytes", "group")),
        ("weights", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [outputs, columns] of integers with ``bits`` 8 or 4, symmetric around 0: the values are the integers
    times their group's scale.

    ``words``: int32 [outputs, padded columns * bits / 32]; in a run of 64 columns (128 of 4 bits), number n of word i
    is column 16 n + i. ``scales``: fp32 [outputs, groups].
    """

    bits: int
    columns: int
    words: Tensor
    scales: Tensor

    @classmethod
    def of(cls, matrix: Tensor, bits: int, group: int | None = None) -> QuantizedMatrix:
        """Rounded to nearest; the largest value of each ``group`` columns of a row (None: of the row) is the largest
        integer.

        ValueError: not 4 or 8 bits, or the group is not a multiple of a run, or does not divide the padded columns.
        """
        if bits not in RUNS:
            raise ValueError(f"bits={bits}: weights are quantized to 8 or 4")
        run, (outputs, columns) = RUNS[bits], matrix.shape
        padded = -(-columns // run) * run
        group = group or padded
        if group % run or padded % group:
            raise ValueError(
                f"a group of {group} columns: with {bits} bits a multiple of {run} that divides {padded} is needed"
            )
        largest = 2 ** (bits - 1) - 1
        grouped = functional.pad(matrix.detach().float(), (0, padded - columns)).view(outputs, -1, group)
        scales = grouped.abs().amax(-1) / largest
        divisors = torch.where(scales == 0, torch.ones_like(scales), scales)
        whole = (grouped / divisors[..., None]).round().clamp(-largest, largest).to(torch.int32)
        return cls(bits, columns, cls.from_levels(whole.view(outputs, padded), bits), scales)

    @staticmethod
    def from_levels(whole: Tensor, bits: int) -> Tensor:
        """``words`` of integers (int32 [outputs, columns], whole runs) that are known already."""
        return _packed(whole, bits)

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.columns

    @property
    def group(self) -> int:
        """Columns with one scale."""
        return self.words.shape[1] * (32 // self.bits) // self.scales.shape[1]

    def values(self, dtype: torch.dtype) -> Tensor:
        """[outputs, columns]."""
        whole = _unpacked(self.words, self.bits)
        grouped = whole.view(whole.shape[0], self.scales.shape[1], -1)
        return (grouped * self.scales[..., None]).view(whole.shape)[:, : self.columns].to(dtype)


def _packed(whole: Tensor, bits: int) -> Tensor:
    parts = (whole & (2**bits - 1)).view(whole.shape[0], -1, 32 // bits, LANES)
    words = torch.zeros(parts.shape[0], parts.shape[1], LANES, dtype=torch.int32, device=whole.device)
    for number in range(32 // bits):
        words |= parts[:, :, number] << (bits * number)
    return words.view(whole.shape[0], -1)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    runs = words.view(words.shape[0], -1, 1, LANES)
    numbers = torch.arange(32 // bits, device=words.device, dtype=torch.int32).view(-1, 1)
    return ((runs << (32 - bits * (numbers + 1))) >> (32 - bits)).reshape(words.shape[0], -1)


def takes_bfloat16(weight: Tensor) -> bool:
    """Whether ``product`` has a kernel for such a weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and library() is not None
    )


def product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``functional.linear`` of bfloat16: [.., columns] -> [.., outputs]. One row by the kernel, without a graph: for
    more, torch is as fast."""
    one = input.numel() == weight.shape[1] > 0
    graph = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
    if not one or graph or input.dtype is not torch.bfloat16 or not takes_bfloat16(weight):
        return functional.linear(input, weight, bias)
    row_bytes = weight.stride(0) * weight.itemsize
    return _run(input, weight, None, bias, Weights.BFLOAT16, weight.shape[1], row_bytes)


def quantized_product(input: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """[.., columns] -> [.., outputs], in the dtype of the input. Up to 64 rows of bfloat16 by the kernel; else the
    values are made for the product and forgotten."""
    rows = input.numel() // matrix.columns if matrix.columns else 0
    host = input.device.type == "cpu" and library() is not None
    if not 1 <= rows <= MOST_ROWS or input.dtype is not torch.bfloat16 or not host:
        return functional.linear(input, matrix.values(input.dtype), bias)
    kind = Weights.INT8 if matrix.bits == 8 else Weights.INT4
    row_bytes = matrix.words.shape[1] * matrix.words.itemsize
    parts = [
        _run(part, matrix.words, matrix.scales, bias, kind, matrix.group, row_bytes)
        for part in input.reshape(rows, matrix.columns).split(CALL_ROWS)
    ]
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output.view(*input.shape[:-1], matrix.shape[0])


def _run(
    input: Tensor,
    matrix: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    kind: Weights,
    group: int,
    row_bytes: int,
) -> Tensor:
    lib = library()
    assert lib is not None
    input = input if input.is_contiguous() else input.contiguous()
    output = torch.empty(*input.shape[:-1], matrix.shape[0], dtype=torch.bfloat16)
    columns = input.shape[-1]
    described = _Product(
        output.data_ptr(),
        input.data_ptr(),
        matrix.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        *(input.numel() // columns, matrix.shape[0], columns, row_bytes, group),
        kind,
    )
    lib.ds_small_product(ctypes.byref(described), torch.get_num_threads())
    return output
