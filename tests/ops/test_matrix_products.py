"""Native products of fp32 matrices, and linear layers made of them, against plain products in fp64. A sum of n rounded
products may be off by n + 1 roundings of the sum of their magnitudes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.observe.flops import get_model_profile
from deepspeed.ops import native
from deepspeed.ops.transformer import products
from deepspeed.ops.transformer.products import linear, product
from deepspeed.ops.transformer.transformer import GeluLinear

pytestmark = pytest.mark.skipif(native.library() is None, reason="built without native kernels")

SIZES = [(1, 1, 1), (8, 48, 192), (13, 50, 17), (40, 100, 193), (400, 33, 64), (9, 400, 400)]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On any processor, at any size."""
    torch.manual_seed(0)
    monkeypatch.setattr(products, "is_faster", lambda: True)
    monkeypatch.setattr(products, "_WORTHWHILE", 0)
    yield


def matrix(rows: int, columns: int, transposed: bool) -> Tensor:
    return torch.randn(columns, rows).mT if transposed else torch.randn(rows, columns)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_of_matrices_that_lie_either_way(sizes: tuple[int, int, int]) -> None:
    rows, columns, depth = sizes
    bias = torch.randn(columns)
    for a_transposed in (False, True):
        for b_transposed in (False, True):
            a, b = matrix(rows, depth, a_transposed), matrix(depth, columns, b_transposed)
            exact = a.double() @ b.double()
            tolerance = 2**-24 * (depth + 3) * (a.double().abs() @ b.double().abs() + bias.double().abs())
            assert ((product(a, b).double() - exact).abs() <= tolerance).all()
            assert ((product(a, b, bias).double() - exact - bias.double()).abs() <= tolerance).all()
    wider = torch.randn(rows, depth + 5)[:, 2:-3]  # rows apart
    assert torch.equal(product(wider, b), product(wider.contiguous(), b))
    assert torch.equal(product(b[:1].expand(3, -1), b.mT), product(b[:1].repeat(3, 1), b.mT))


def test_the_same_bits_from_any_instruction_set_and_number_of_threads() -> None:
    lib = native.library()
    assert lib is not None
    best, threads = lib.ds_isa(), torch.get_num_threads()
    a, b = torch.randn(500, 200), torch.randn(700, 200).mT
    found = []
    try:
        for isa, count in [*((isa, 1) for isa in range(best + 1)), (best, 2), (best, 3)]:
            assert lib.ds_set_isa(isa) == isa
            torch.set_num_threads(count)
            found.append((product(a, b), product(b.mT, a.mT)))
    finally:
        lib.ds_set_isa(best)
        torch.set_num_threads(threads)
    for one, other in found[1:]:
        assert torch.equal(one, found[0][0]) and torch.equal(other, found[0][1])
    # and a number is the same whatever else is computed with it
    assert torch.equal(product(a[3:4], b[:, 60:61]), found[0][0][3:4, 60:61])


@pytest.mark.parametrize("function", ["linear", "gelu"])
def test_values_and_gradients_of_layers(function: str) -> None:
    x, weight, bias = torch.randn(2, 5, 36), torch.randn(20, 36), torch.randn(20)
    given = [each.requires_grad_() for each in (x, weight, bias)]
    wide = [each.detach().double().requires_grad_() for each in given]
    grad = torch.randn(2, 5, 20)
    if function == "linear":
        mine, exact = linear(*given), functional.linear(*wide)
    else:
        mine = GeluLinear.apply(x, weight) + bias
        exact = functional.linear(functional.gelu(wide[0]), *wide[1:])
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(exact, wide, grad.double())
    for one, other in zip(torch.autograd.grad(mine, given, grad), wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5)


def test_only_what_is_asked_for_has_a_gradient() -> None:
    x, weight = torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)
    linear(x, weight).sum().backward()  # a gradient that is an expanded view
    assert weight.grad is not None and x.grad is None
    torch.testing.assert_close(weight.grad, x.sum(0).expand(3, -1))


def test_gradients_of_gradients() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)

    def penalty(layer: object) -> Tensor:
        (of_x,) = torch.autograd.grad(layer(x, weight).square().sum(), x, create_graph=True)  # type: ignore[operator]
        return torch.autograd.grad(of_x.square().sum(), weight)[0]

    torch.testing.assert_close(penalty(linear), penalty(functional.linear), rtol=1e-5, atol=1e-4)


def test_who_counts_operations_sees_torchs() -> None:
    class Layer(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return linear(input, self.weight, self.bias)

    _, macs, _ = get_model_profile(
        Layer(16, 32), input_shape=(4, 16), print_profile=False, as_string=False, warm_up=0
    )
    assert macs == 4 * 16 * 32


def test_other_types_are_torchs() -> None:
    x, weight = torch.randn(4, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(linear(x, weight), functional.linear(x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x.float(), weight.float()).dtype is torch.bfloat16
