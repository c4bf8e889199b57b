"""Products of 8-bit floating-point numbers: values of the format, scales, and a layer against plain products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from deepspeed.ops import float8
from deepspeed.ops.float8 import E4M3, E5M2, Rounded, float8_linear, has_float8_products, scaled


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """By search among all numbers of the format, after the largest power of two that fits."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[every.isfinite()].unique()
    scale, limit = 1.0, every.max()
    while values.abs().max() * scale * 2 <= limit:
        scale *= 2
    while values.abs().max() * scale > limit:
        scale /= 2
    wanted = values.double() * scale
    distance = (wanted[..., None] - every).abs()
    return every[distance.argmin(-1)] / scale


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e3])
def test_values_are_the_nearest_of_the_format(dtype: torch.dtype, given: torch.dtype, size: float) -> None:
    values = (torch.randn(40, 7) * size).to(given)
    codes, scale = scaled(values, dtype)
    assert codes.dtype == dtype and scale.dim() == 0
    assert torch.frexp(scale)[0] == 0.5  # a power of two
    found = codes.double() * scale.double()
    expected = nearest(values, dtype)
    step = (expected - values.double()).abs()
    assert torch.all((found - values.double()).abs() <= step + 1e-12 * size)


def test_zeros_and_what_is_not_finite() -> None:
    codes, scale = scaled(torch.zeros(3, 4), E4M3)
    assert not codes.float().any() and scale == 1
    for wrong in (float("nan"), float("inf")):
        codes, scale = scaled(torch.tensor([1.0, wrong]), E5M2)
        assert (codes.float() * scale).isnan().all()


def oracle(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of the input and of the weight, in fp64 of rounded values."""

    def value(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scale = scaled(tensor, dtype)
        return codes.double() * scale.double()

    a, w, g = value(x, E4M3), value(weight, E4M3), value(grad, E5M2)
    return a @ w.T, g @ w, g.flatten(0, -2).T @ a.flatten(0, -2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_rounded_values(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 32, dtype=dtype, requires_grad=True)
    weight = (0.1 * torch.randn(48, 32)).to(dtype).requires_grad_()
    bias = torch.randn(48, dtype=dtype, requires_grad=True)
    grad = torch.randn(3, 5, 48, dtype=dtype)
    out = float8_linear(x, weight, bias, emulate=True)
    out.backward(grad)
    assert out.dtype == dtype and x.grad is not None and weight.grad is not None and bias.grad is not None
    expected, of_input, of_weight = oracle(x.detach(), weight.detach(), grad)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(out.double(), expected + bias.double(), **tolerance)
    torch.testing.assert_close(x.grad.double(), of_input, **tolerance)
    torch.testing.assert_close(weight.grad.double(), of_weight, **tolerance)
    torch.testing.assert_close(bias.grad, grad.flatten(0, 1).sum(0), **tolerance)
    plain = linear(x.detach().float(), weight.detach().float(), bias.detach().float())
    assert (out.float() - plain).norm() < 0.05 * plain.norm()


def test_backward_keeps_one_byte_per_value() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        float8_linear(x, weight, emulate=True)
    assert sum(t.nbytes for t in kept if t is not weight) == 64 * 32 + 4


def test_layers_with_one_input_share_its_codes() -> None:
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    x = torch.randn(64, 32, requires_grad=True)
    weights = [torch.randn(16, 32, requires_grad=True) for _ in range(3)]
    shared = Rounded()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outs = [float8_linear(x, weight, emulate=True, rounded=shared) for weight in weights]
    assert sum(t.numel() for t in kept.values() if t.dtype == E4M3) == 64 * 32
    with torch.no_grad():
        x.mul_(-1)  # the same tensor with other values
    assert torch.equal(float8_linear(x, weights[0], emulate=True, rounded=shared), -outs[0])
    assert torch.equal(float8_linear(-x, weights[0], emulate=True, rounded=shared), outs[0])


def test_gradients_that_are_not_finite_stay_so() -> None:
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    out = float8_linear(x, weight, emulate=True)
    out.backward(torch.full_like(out, float("inf")))
    assert weight.grad is not None and weight.grad.isnan().all()


def test_the_products_of_devices_get_what_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, columns one after another in memory, and whole tiles of what is added over: checked by a product that
    is as strict as a GPU's, in place of it."""

    def strict(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert a.is_contiguous() and b.t().is_contiguous() and a.shape[1] == b.shape[0]
        assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0
        assert {a.dtype, b.dtype} in (
            {E4M3},
            {E4M3, E5M2},
        ) and scale_a.dtype == scale_b.dtype == torch.float32
        return ((a.double() @ b.double()) * scale_a.double() * scale_b.double()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", strict)
    x = torch.randn(2, 11, 32, requires_grad=True)  # 22 rows: filled up to 32
    weight = torch.randn(16, 32, requires_grad=True)
    found = []
    for emulate in (False, True):
        out = float8_linear(x, weight, emulate=emulate)
        found.append((out, *torch.autograd.grad(out.square().sum(), (x, weight))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_hosts_have_no_such_products() -> None:
    assert not has_float8_products(torch.device("cpu"))
    assert float8.ALIGNMENT == 16
