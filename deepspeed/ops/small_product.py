"""Products of few rows with a weight matrix that is read once: bfloat16, or integers with scales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.ops import gpu
from deepspeed.ops.formats.integers import symmetric_levels
from deepspeed.ops.host_graph import GraphMatrix, GraphStep, HostGraph
from deepspeed.ops.host_graph import Weights as Weights
from deepspeed.ops.native import DTYPE_CODES, library

MAX_ROWS = {Weights.FLOAT32: 0, Weights.BFLOAT16: 16, Weights.INT8: 512, Weights.INT4: 512}
"""Maximum rows for which the kernel is faster than torch, which must dequantize integers first."""
MAX_ROWS_WITHOUT_AVX512 = {Weights.BFLOAT16: 4096}
"""The same for CPUs on which torch's bfloat16 product is slow (with AVX2 a sixth of the kernel's speed)."""
PROGRAM_ROWS, PROGRAM_ROWS_OF_FLOATS = 512, 64
"""The same for a whole forward as one program, which avoids the overhead of torch's small operations; and with fp32
weights on CPUs without AVX-512."""
GPU_ROWS = 64
"""The same for integers on a GPU. Not measured: there, a decode step is bound by reading weights."""
LANES = 16
RUNS = {8: 64, 4: 128}
"""Columns per run, by bits of an integer: groups are multiples of it."""


def padded_columns(columns: int, bits: int) -> int:
    """Round up to whole runs of integers of ``bits``."""
    return -(-columns // RUNS[bits]) * RUNS[bits]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [outputs, columns] of 8- or 4-bit integers (``bits``), symmetric around 0. A value is the integer times
    the scale of its group.

    ``words``: int32 [outputs, padded columns * bits / 32]; in a run of 64 columns (128 with 4 bits), element n of word
    i is column 16 n + i. ``scales``: fp32 [outputs, groups].
    """

    bits: int
    columns: int
    words: Tensor
    scales: Tensor

    @classmethod
    def of(cls, matrix: Tensor, bits: int, group: int | None = None) -> QuantizedMatrix:
        """Quantize a matrix by rounding to nearest; the largest magnitude of each ``group`` columns of a row (None: of
        the row) becomes the largest integer.

        ValueError: not 4 or 8 bits, or the group is not a multiple of a run, or does not divide the padded columns.
        """
        if bits not in RUNS:
            raise ValueError(f"bits={bits}: must be 8 or 4")
        run, (outputs, columns) = RUNS[bits], matrix.shape
        padded = padded_columns(columns, bits)
        group = group or padded
        if group % run or padded % group:
            raise ValueError(
                f"a group of {group} columns: with {bits} bits it must be a multiple of {run} that divides {padded}"
            )
        grouped = functional.pad(matrix.detach().float(), (0, padded - columns)).view(outputs, -1, group)
        levels, scales = symmetric_levels(grouped, bits, narrow=True)
        words = cls.from_levels(levels.to(torch.int32).view(outputs, padded), bits)
        return cls(bits, columns, words, scales.squeeze(-1))

    @staticmethod
    def from_levels(whole: Tensor, bits: int) -> Tensor:
        """Return ``words`` of given integers (int32 [outputs, columns], whole runs)."""
        parts = (whole & (2**bits - 1)).view(whole.shape[0], -1, 32 // bits, LANES)
        words = torch.zeros(parts.shape[0], parts.shape[1], LANES, dtype=torch.int32, device=whole.device)
        for number in range(32 // bits):
            words |= parts[:, :, number] << (bits * number)
        return words.view(whole.shape[0], -1)

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.columns

    @property
    def group(self) -> int:
        """Number of columns per scale."""
        return self.words.shape[1] * (32 // self.bits) // self.scales.shape[1]

    def described(self, bias: Tensor | None = None) -> GraphMatrix:
        """Return the description of the matrix for the kernels."""
        kind = Weights.INT8 if self.bits == 8 else Weights.INT4
        return GraphMatrix(kind, self.words, self.columns, bias, self.scales, self.group)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values [outputs, columns]."""
        whole = _unpacked(self.words, self.bits)
        grouped = whole.view(whole.shape[0], self.scales.shape[1], -1)
        return (grouped * self.scales[..., None]).view(whole.shape)[:, : self.columns].to(dtype)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    runs = words.view(words.shape[0], -1, 1, LANES)
    numbers = torch.arange(32 // bits, device=words.device, dtype=torch.int32).view(-1, 1)
    return ((runs << (32 - bits * (numbers + 1))) >> (32 - bits)).reshape(words.shape[0], -1)


def by_kernel(kind: Weights, rows: int) -> bool:
    """Return whether the host kernel, rather than torch, computes a product of ``rows`` rows. Decided only here."""
    return 1 <= rows <= most_rows(kind) and library() is not None


@cache
def most_rows(kind: Weights) -> int:
    """Return the maximum rows for the kernel; see ``MAX_ROWS``."""
    narrow = "AVX512" not in torch.backends.cpu.get_cpu_capability()
    return (MAX_ROWS_WITHOUT_AVX512 if narrow else MAX_ROWS).get(kind, MAX_ROWS[kind])


def takes_bfloat16(weight: Tensor) -> bool:
    """Return whether ``product`` has a kernel for this weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and library() is not None
    )


class SmallProducts:
    """Products with a sequence of matrices, each described to the library only once. Copies start empty."""

    def __init__(self) -> None:
        self._known: tuple[Any, ...] | None = None
        self._program = HostGraph()
        self._made: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (SmallProducts, ())

    def __call__(self, input: Tensor, matrix: GraphMatrix) -> Tensor:
        """Multiply: [.., columns] -> [.., outputs], in the dtype of the input."""
        input = input if input.is_contiguous() else input.contiguous()
        output = torch.empty(*input.shape[:-1], matrix.outputs, dtype=input.dtype)
        wanted = _described(matrix)
        if self._known != wanted:
            self._known, self._program = wanted, HostGraph()
            rows = input.view(-1, matrix.columns)
            self._made = self._program.product(rows, output.view(-1, matrix.outputs), [matrix])
        made = self._made
        made.input, made.output = input.data_ptr(), output.data_ptr()
        made.input_dtype = made.output_dtype = DTYPE_CODES[input.dtype]
        self._program.run(GraphStep(input.numel() // matrix.columns))
        return output


def _described(matrix: GraphMatrix) -> tuple[Any, ...]:
    """Return the library's description of a matrix: addresses, not tensors, since a tensor's address changes when its
    ``data`` is replaced (streamed weights)."""
    scales, bias = matrix.scales, matrix.bias
    return (
        matrix.kind,
        matrix.columns,
        matrix.values.shape,
        matrix.group,
        matrix.values.data_ptr(),
        0 if scales is None else (scales.data_ptr(), scales.shape),
        0 if bias is None else (bias.data_ptr(), bias.dtype),
    )


def product(
    input: Tensor, weight: Tensor, bias: Tensor | None, products: SmallProducts | None = None
) -> Tensor:
    """Compute ``functional.linear`` of bfloat16: [.., columns] -> [.., outputs]. Few rows use the kernel, without
    autograd. ``products``: cache of a layer that calls this repeatedly."""
    columns = weight.shape[1]
    rows = input.numel() // columns if columns else 0
    graph = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
    wanted = by_kernel(Weights.BFLOAT16, rows) and not graph and input.dtype is torch.bfloat16
    if not wanted or not takes_bfloat16(weight):
        return functional.linear(input, weight, bias)
    return (products or SmallProducts())(input, GraphMatrix(Weights.BFLOAT16, weight, columns, bias))


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows to int8 [.., columns], the largest magnitude of a row becoming 127, with scales fp32 [.., 1]."""
    levels, scales = symmetric_levels(x.detach().float(), 8, narrow=True)
    return levels.to(torch.int8), scales


def rounded_product(input: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """Compute ``quantized_product`` with inputs rounded to 8 bits, each row by its largest magnitude (W8A8): on a GPU
    as a product of integers, elsewhere with the values that they represent."""
    whole, scales = rounded_rows(input)
    if input.numel() and gpu.usable(input, matrix.words, matrix.scales, bias):
        from deepspeed.ops.gpu import integer_products  # imports Triton

        if integer_products.supports(input, bias) and integer_products.supports_integers(
            matrix.bits, matrix.scales, matrix.group
        ):
            shape = matrix.words, matrix.scales, bias
            return integer_products.product_of_integers(
                whole, scales, *shape, bits=matrix.bits, columns=matrix.columns, dtype=input.dtype
            )
    values = (whole * scales).to(input.dtype)
    return functional.linear(
        values, matrix.values(input.dtype), None if bias is None else bias.to(input.dtype)
    )


def quantized_product(
    input: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, products: SmallProducts | None = None
) -> Tensor:
    """Multiply: [.., columns] -> [.., outputs], in the dtype of the input. Few rows use a kernel of host or GPU; for
    more, and under autograd, the weights are dequantized temporarily."""
    rows = input.numel() // matrix.columns if matrix.columns else 0
    graph = torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad))
    if not graph and 1 <= rows <= GPU_ROWS and gpu.usable(input, matrix.words, matrix.scales, bias):
        from deepspeed.ops.gpu import integer_products  # imports Triton

        if integer_products.supports(input, bias):
            words, scales = matrix.words, matrix.scales
            return integer_products.product(
                input, words, scales, bias, bits=matrix.bits, columns=matrix.columns
            )
    described = matrix.described(bias)
    on_host = input.device.type == "cpu" and input.dtype in DTYPE_CODES
    if graph or not on_host or not by_kernel(described.kind, rows):
        return functional.linear(input, matrix.values(input.dtype), bias)
    return (products or SmallProducts())(input, described)
