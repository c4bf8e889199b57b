"""Products with weights of 16, 8 and 4 bits against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from deepspeed.ops import native
from deepspeed.ops.host_graph import GraphMatrix, Weights
from deepspeed.ops.small_product import (
    QuantizedMatrix,
    SmallProducts,
    product,
    quantized_product,
    takes_bfloat16,
)

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("columns", [16, 5, 96, 133])
@pytest.mark.parametrize("rows", [1, 2])
def test_bfloat16(rows: int, columns: int) -> None:
    input, weight = draw(rows, columns).bfloat16(), draw(37, columns, seed=1).bfloat16()
    bias = draw(37, seed=2).bfloat16() if rows % 2 else None
    assert takes_bfloat16(weight)
    exact = functional.linear(input.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(product(input, weight, bias).double(), exact, rtol=2**-8, atol=1e-2)


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 64), (4, None), (4, 128)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 30, 70])
@pytest.mark.parametrize("columns", [256, 200])
def test_integers(bits: int, group: int | None, rows: int, columns: int) -> None:
    matrix = QuantizedMatrix.of(draw(37, columns, seed=1), bits, group)
    input, bias = draw(rows, columns).bfloat16(), draw(37, seed=2).bfloat16()
    exact = functional.linear(input.double(), matrix.values(torch.float64), bias.double())
    found = quantized_product(input, matrix, bias)
    error = 0.05 if rows > 64 else 1e-2  # values are rounded to bfloat16 for many rows
    torch.testing.assert_close(found.double(), exact, rtol=error, atol=5 * error)
    assert found.dtype is torch.bfloat16
    assert quantized_product(input.float(), matrix, None).dtype is torch.float32


def test_shapes_with_more_dims_and_views() -> None:
    weight = draw(6, 32, seed=1).bfloat16()
    input = draw(2, 32, 3).bfloat16().transpose(1, 2)
    torch.testing.assert_close(
        product(input, weight, None), functional.linear(input, weight), rtol=1e-2, atol=2e-2
    )
    empty = product(input[:0], weight, None)
    assert empty.shape == (0, 3, 6)


def test_a_graph_is_left_to_torch() -> None:
    weight = draw(6, 32, seed=1).bfloat16().requires_grad_()
    product(draw(1, 32).bfloat16(), weight, None).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("bits", [8, 4])
def test_the_gradient_of_the_input_of_integers(bits: int) -> None:
    matrix = QuantizedMatrix.of(draw(6, 128, seed=1), bits)
    input = draw(1, 128).requires_grad_()
    quantized_product(input, matrix, None).sum().backward()
    assert input.grad is not None
    torch.testing.assert_close(input.grad[0], matrix.values(torch.float32).sum(0))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_all_instruction_sets_give_the_same_bits(bits: int) -> None:
    lib: Any = native.library()
    weight, input = draw(37, 256, seed=1), draw(1 if bits == 16 else 3, 256).bfloat16()
    best, found = lib.ds_isa(), []
    try:
        for isa in range(best + 1):
            lib.ds_set_isa(isa)
            if bits == 16:
                found.append(product(input, weight.bfloat16(), None))
            else:
                found.append(quantized_product(input, QuantizedMatrix.of(weight, bits, 128), None))
    finally:
        lib.ds_set_isa(best)
    assert all(torch.equal(each, found[-1]) for each in found)


def between_nans(values: torch.Tensor) -> torch.Tensor:
    """The same numbers, in memory that has NaN before and behind."""
    around = torch.full((values.numel() + 256,), float("nan"), dtype=values.dtype)
    inside = around[128:-128].view(values.shape)
    return inside.copy_(values)


@pytest.mark.parametrize("columns", [1, 8, 16, 24, 48, 80, 112, 144, 200])
@pytest.mark.parametrize("outputs", [32, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_beside_the_matrix_is_read(dtype: torch.dtype, outputs: int, columns: int) -> None:
    lib: Any = native.library()
    kind = Weights.FLOAT32 if dtype is torch.float32 else Weights.BFLOAT16
    weight, products, best = draw(outputs, columns, seed=1).to(dtype), SmallProducts(), lib.ds_isa()
    found = []
    try:
        for isa in range(best + 1):
            lib.ds_set_isa(isa)
            for rows in (1, 2, 3, 5, 8, 13, 16, 33):
                input = draw(rows, columns).to(dtype)
                exact = functional.linear(input.double(), weight.double())
                got = products(between_nans(input), GraphMatrix(kind, between_nans(weight), columns))
                torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=1e-1)
                found.append(got)
    finally:
        lib.ds_set_isa(best)
    assert all(torch.equal(got, found[i % 8]) for i, got in enumerate(found))


def test_rounding_to_nearest_within_half_a_step() -> None:
    weight = draw(20, 256)
    for bits in (8, 4):
        matrix = QuantizedMatrix.of(weight, bits, 128)
        assert matrix.shape == (20, 256) and matrix.words.nbytes == 20 * 256 * bits // 8
        steps = matrix.scales.repeat_interleave(128, 1)
        assert bool(((matrix.values(torch.float32) - weight).abs() <= steps * 0.5001).all())
    assert torch.equal(QuantizedMatrix.of(torch.zeros(2, 16), 4).values(torch.float32), torch.zeros(2, 16))
    with pytest.raises(ValueError, match="bits=3"):
        QuantizedMatrix.of(weight, 3)
    with pytest.raises(ValueError, match="a group of 64 columns: with 4 bits it must be a multiple of 128"):
        QuantizedMatrix.of(weight, 4, 64)
