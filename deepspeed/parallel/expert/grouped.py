"""Grouped GEMM over stacked experts, forward and backward.

Each expert's rows are one matrix product, written to its place in an output that is allocated once. Unbinding the
weights under autograd would instead allocate a gradient per expert and then copy all of them into one tensor: if
experts have few tokens, that takes longer than the products (``benchmarks/expert_products.py``). On a GPU, one launch
of a Triton kernel computes all experts, unless they have many rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops import gpu

GPU_ROWS = 1024
"""Maximum mean number of rows per expert for the single launch on a GPU. Not measured: a larger product fills a GPU
alone, and cuBLAS computes it best."""


def grouped_linear(
    rows: Tensor, weight: Tensor, counts: Sequence[int], bias: Tensor | None = None, *, triton: bool = True
) -> Tensor:
    """Multiply ``rows`` [n, in], sorted by expert, by ``weight`` [experts, in, out] (any strides) and add ``bias``
    [experts, out]. Returns [n, out]. ``counts``: rows per expert; an expert without rows gets a zero gradient.
    ``triton``: whether the Triton kernel may be used on a GPU."""
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight, bias = (None if each is None else each.to(dtype) for each in (rows, weight, bias))  # type: ignore[assignment]
    if triton and len(rows) <= GPU_ROWS * len(weight) and gpu.usable(rows, weight, bias):
        from deepspeed.ops.gpu import grouped_gemm as grouped_products  # imports Triton

        if grouped_products.supports(rows, weight, bias):
            ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            return grouped_products.GroupedProduct.apply(rows, weight, ends.to(rows.device), bias)
    return _GroupedLinear.apply(rows, weight, bias, tuple(counts))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        result = rows.new_empty(len(rows), weight.shape[2])
        for expert, span in _row_slices(counts):
            if bias is None:
                torch.mm(rows[span], weight[expert], out=result[span])
            else:
                torch.addmm(bias[expert], rows[span], weight[expert], out=result[span])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        to_rows, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad = grad.contiguous()
        grad_rows = torch.empty_like(rows) if to_rows else None
        grad_weight = torch.empty_like(weight) if to_weight else None
        grad_bias = grad.new_empty(len(weight), weight.shape[2]) if to_bias else None
        for expert, span in _row_slices(ctx.counts):
            if grad_rows is not None:
                torch.mm(grad[span], weight[expert].t(), out=grad_rows[span])
            if grad_weight is not None:
                torch.mm(rows[span].t(), grad[span], out=grad_weight[expert])
            if grad_bias is not None:
                torch.sum(grad[span], 0, out=grad_bias[expert])
        for expert, count in enumerate(ctx.counts):
            for each in (grad_weight, grad_bias):
                if not count and each is not None:
                    each[expert].zero_()
        return grad_rows, grad_weight, grad_bias, None


def _row_slices(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield (expert, slice of its rows) for each expert that has rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
