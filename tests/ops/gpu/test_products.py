"""Products with integer weights, and of groups of rows, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspeed.ops.small_product import QuantizedMatrix, rounded_product, rounded_rows
from tests.ops.gpu.triton_kit import assembled, built, compiling, interpreted

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype is wanted.dtype and found.shape == wanted.shape
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)
    assert error < TOLERANCES[dtype], error


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("bits", "columns", "group"), [(8, 200, 64), (8, 64, None), (4, 300, 128), (4, 130, None)]
)
@interpreted
def test_integer_weights(dtype: torch.dtype, bits: int, columns: int, group: int | None) -> None:
    from deepspeed.ops.gpu import integer_products

    matrix = QuantizedMatrix.of(torch.randn(37, columns), bits, group)
    bias = torch.randn(37, dtype=dtype) if columns % 100 == 0 else None
    for shape in ((1, columns), (3, 6, columns)):
        x = torch.randn(shape).to(dtype)
        found = integer_products.product(x, matrix.words, matrix.scales, bias, bits=bits, columns=columns)
        wanted = torch.nn.functional.linear(
            x.double(), matrix.values(torch.float64), None if bias is None else bias.double()
        )
        assert_near(found, wanted.to(dtype), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("bits", "columns", "group"), [(8, 200, 128), (8, 72, None), (4, 300, 384), (4, 512, 256)]
)
@interpreted
def test_inputs_of_8_bits(dtype: torch.dtype, bits: int, columns: int, group: int | None) -> None:
    from deepspeed.ops.gpu import integer_products

    matrix = QuantizedMatrix.of(torch.randn(37, columns), bits, group)
    bias = torch.randn(37, dtype=dtype) if columns % 100 == 0 else None
    x = torch.randn(2, 9, columns).to(dtype)
    x[1, 3] = 0
    assert integer_products.supports_integers(bits, matrix.scales, matrix.group)
    whole, scales = rounded_rows(x)
    assert (whole.double() * scales - x.double()).abs().le(scales.double() / 1.99).all()
    parts = matrix.words, matrix.scales, bias
    found = integer_products.product_of_integers(
        whole, scales, *parts, bits=bits, columns=columns, dtype=dtype
    )
    wanted = torch.nn.functional.linear(
        whole.double() * scales, matrix.values(torch.float64), None if bias is None else bias.double()
    )
    assert_near(found, wanted.to(dtype), dtype)
    assert_near(rounded_product(x, matrix, bias), wanted.to(dtype), dtype)


@compiling
def test_integer_weights_compile() -> None:
    from deepspeed.ops.gpu import integer_products

    for bits, columns, rows, dtype in ((8, 256, 1, torch.bfloat16), (4, 256, 64, torch.float16)):
        matrix = QuantizedMatrix.of(torch.randn(64, columns), bits)
        x = torch.empty(rows, columns, dtype=dtype)
        found = assembled(
            lambda x=x, m=matrix: integer_products.product(
                x, m.words, m.scales, None, bits=m.bits, columns=m.columns
            )
        )
        assert {name for name, _, _ in found} == {"_weights_kernel"}
        assert all("mma" in ptx for _, _, ptx in found)  # by matrix units
        whole, scales = rounded_rows(x)
        parts = matrix.words, matrix.scales, None
        found = assembled(
            lambda w=whole, s=scales, p=parts, m=matrix: integer_products.product_of_integers(
                w, s, *p, bits=m.bits, columns=m.columns, dtype=torch.bfloat16
            )
        )
        assert {name for name, _, _ in found} == {"_integers_kernel"}


def grouped(rows: Tensor, matrices: Tensor, counts: list[int], bias: Tensor | None) -> Tensor:
    """One product after another."""
    results, start = [], 0
    for run, count in enumerate(counts):
        product = rows[start : start + count] @ matrices[run]
        results.append(product if bias is None else product + bias[run])
        start += count
    results.append(torch.zeros(len(rows) - start, matrices.shape[2], dtype=rows.dtype))
    return torch.cat(results)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", [[0, 70, 1, 0, 33], [0, 3, 1], [291, 0], [1]], ids=str)
@interpreted
def test_groups_of_rows_with_gradients(dtype: torch.dtype, transposed: bool, counts: list[int]) -> None:
    from deepspeed.ops.gpu.grouped_gemm import GroupedProduct

    runs, used = len(counts), sum(counts)
    ends = torch.tensor(counts).cumsum(0).int()
    given = [
        torch.randn(used + 2, 45),
        torch.randn(runs, 45, 67),
        torch.randn(runs, 67),
    ]  # two rows are of none
    if transposed:
        given[1] = torch.randn(runs, 67, 45).transpose(1, 2)
        given.pop()
    ours = [each.to(dtype).requires_grad_() for each in given]
    exact = [each.detach().double().requires_grad_() for each in ours]
    bias = None if transposed else ours[2]
    found = GroupedProduct.apply(ours[0], ours[1], ends, bias)
    wanted = grouped(exact[0], exact[1], counts, None if transposed else exact[2])
    assert_near(found, wanted.to(dtype), dtype)
    assert not found[used:].any()
    grad = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, ours, grad), torch.autograd.grad(wanted, exact, grad.double()), strict=True
    ):
        assert_near(a, b.to(dtype), dtype)


@interpreted
def test_no_rows_at_all() -> None:
    from deepspeed.ops.gpu.grouped_gemm import GroupedProduct

    rows, matrices = torch.randn(0, 4, requires_grad=True), torch.randn(3, 4, 5, requires_grad=True)
    found = GroupedProduct.apply(rows, matrices, torch.zeros(3, dtype=torch.int32), None)
    assert found.shape == (0, 5)
    found.sum().backward()
    assert not matrices.grad.any() and rows.grad.shape == (0, 4)


@compiling
def test_groups_of_rows_compile() -> None:
    from deepspeed.ops.gpu.grouped_gemm import GroupedProduct

    def train(dtype: torch.dtype, count: int) -> None:
        rows = torch.empty(count, 64, dtype=dtype, requires_grad=True)
        matrices = torch.empty(8, 64, 96, dtype=dtype, requires_grad=True)
        bias = torch.empty(8, 96, dtype=dtype, requires_grad=True)
        GroupedProduct.apply(rows, matrices, torch.zeros(8, dtype=torch.int32), bias).sum().backward()

    both = {"_product_kernel", "_matrices_kernel"}
    for dtype, count, capabilities in (
        (torch.float32, 100, (80,)),
        (torch.bfloat16, 100, (80, 90, 100)),
        (torch.float16, 1000, (90,)),
        (torch.bfloat16, 2000, (80, 100)),
    ):
        assert built(lambda d=dtype, n=count: train(d, n), capabilities) == both
