"""Kernels between products: norms with dropout and residual, gates, rotary embedding with the cache write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.ops.host_graph import Activation
from tests.ops.gpu.test_products import TOLERANCES, assert_near
from tests.ops.gpu.triton_kit import built, compiling, interpreted


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@interpreted
def test_dropout_has_the_bits_of_the_host(dtype: torch.dtype) -> None:
    from deepspeed.ops.gpu import dropout as kernels
    from deepspeed.ops.transformer import transformer as host

    x, residual = torch.randn(3, 1000).to(dtype), torch.randn(3, 1000).to(dtype)
    if not host.runs_here(x, 0.3):
        pytest.skip("built without native kernels")
    for seed in (5, 2**62 - 3, 0xDEADBEEF << 20):
        for rest in (None, residual):
            found, wanted = kernels.dropped(x, 0.3, seed, rest), host.dropped(x, 0.3, seed, rest)
            if dtype is torch.bfloat16:  # the interpreter truncates where the hardware rounds
                assert torch.equal(found == 0, wanted == 0)
                assert_near(found, wanted, dtype)
            else:
                assert torch.equal(found, wanted)


@interpreted
def test_elements_beyond_four_billion_have_numbers_of_their_own() -> None:
    from deepspeed.ops.gpu.dropout import arguments
    from tests.ops.gpu.kernels import which

    rows = []
    for start in (0, 2**22):  # times 1024: 2^32
        rows.append(torch.empty(256, dtype=torch.int32))
        which[(1,)](rows[-1], start, *arguments(0.5, 7)[:3])
    assert not torch.equal(*rows) and all(90 < row.sum() < 166 for row in rows)


def added_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, centered: bool, eps: float
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    apart = total - total.mean(-1, keepdim=True) if centered else total
    result = apart / (apart.square().mean(-1, keepdim=True) + eps).sqrt()
    result = result if weight is None else result * weight
    return total, result if bias is None else result + bias


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("centered", "size"), [(True, 100), (False, 37)])
@interpreted
def test_norms_with_gradients(dtype: torch.dtype, centered: bool, size: int) -> None:
    from deepspeed.ops.gpu.norms import AddedNorm, norm

    shapes = [(3, 5, size), (3, 5, size), (size,), (size,)][: 4 if centered else 3]
    ours = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [each.detach().double().requires_grad_() for each in ours]
    total, found = AddedNorm.apply(*ours, *[None] * (4 - len(ours)), 0.0, 0, 1e-5, centered)
    wanted_total, wanted = added_norm(*exact, *[None] * (4 - len(ours)), centered, 1e-5)
    assert_near(total, wanted_total.to(dtype), dtype)
    assert_near(found, wanted.to(dtype), dtype)
    grads = [torch.randn_like(found), torch.randn_like(found)]
    of_ours = torch.autograd.grad((total, found), ours, grads)
    of_exact = torch.autograd.grad((wanted_total, wanted), exact, [grad.double() for grad in grads])
    for a, b in zip(of_ours, of_exact, strict=True):
        assert_near(a, b.to(dtype), dtype)
    with torch.no_grad():
        again = norm(ours[0], ours[2], residual=ours[1], eps=1e-5)
        assert torch.equal(again[0], total) and (centered or torch.equal(again[1], found))
        alone = norm(ours[0], None, eps=1e-5)
        assert alone[0].data_ptr() == ours[0].data_ptr()


@interpreted
def test_norm_after_dropout() -> None:
    from deepspeed.ops.gpu.dropout import dropped
    from deepspeed.ops.gpu.norms import AddedNorm

    x, residual, weight, bias = (
        torch.randn(shape, requires_grad=True) for shape in [(7, 64)] * 2 + [(64,)] * 2
    )
    total, found = AddedNorm.apply(x, residual, weight, bias, 0.4, 99, 1e-12, True)
    kept = dropped(torch.ones(7, 64), 0.4, 99)
    assert 0.4 < (kept > 0).float().mean() < 0.8
    wanted_total = x * kept + residual
    wanted = functional.layer_norm(wanted_total, (64,), weight, bias, 1e-12)
    torch.testing.assert_close(total, wanted_total)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    grad = torch.randn(7, 64)
    of_ours = torch.autograd.grad(found, (x, residual, weight, bias), grad)
    for a, b in zip(of_ours, torch.autograd.grad(wanted, (x, residual, weight, bias), grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


_ACTIVATIONS = {
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.RELU: functional.relu,
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@interpreted
def test_gates(dtype: torch.dtype) -> None:
    from deepspeed.ops.gpu.gates import Swiglu, gated

    both = torch.randn(5, 2 * 70).to(dtype)
    gate, up = both[:, :70], both[:, 70:]
    for activation, function in _ACTIVATIONS.items():
        found = gated(gate, up, activation)
        assert_near(found, (function(gate.double()) * up.double()).to(dtype), dtype)
        assert_near(gated(gate, None, activation), function(gate.double()).to(dtype), dtype)
    ours = [each.detach().clone().requires_grad_() for each in (gate, up)]
    exact = [each.detach().double().requires_grad_() for each in (gate, up)]
    found, wanted = Swiglu.apply(*ours), functional.silu(exact[0]) * exact[1]
    grad = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, ours, grad), torch.autograd.grad(wanted, exact, grad.double()), strict=True
    ):
        assert_near(a, b.to(dtype), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@interpreted
def test_rotations_and_the_store_to_the_cache(dtype: torch.dtype, normed: bool) -> None:
    from deepspeed.ops.gpu.rotary import rotate_and_store

    heads, kv_heads, key_size, value_size, block_size, pairs = 4, 2, 12, 10, 4, 4
    projected = torch.randn(3, (heads + kv_heads) * key_size + kv_heads * value_size).to(dtype)
    angles = torch.rand(20, pairs) * 6
    positions, blocks, offsets = torch.tensor([[17, 3, 0], [5, 1, 0], [1, 3, 0]])
    keys = torch.zeros(6, kv_heads, key_size, block_size, dtype=dtype)
    values = torch.zeros(6, kv_heads, block_size, value_size, dtype=dtype)
    weights = (torch.rand(key_size) + 0.5, torch.rand(key_size) + 0.5) if normed else None

    queries_keys = projected[:, : (heads + kv_heads) * key_size].double().view(3, -1, key_size)
    if weights is not None:
        of_heads = torch.stack([weights[0]] * heads + [weights[1]] * kv_heads).double()
        mean = queries_keys.square().mean(-1, keepdim=True)
        queries_keys = queries_keys / (mean + 1e-6).sqrt() * of_heads
    turned = queries_keys[..., : 2 * pairs]
    first, second = turned.unflatten(-1, (2, pairs)).unbind(-2)
    cosine, sine = (f(angles[positions]).double()[:, None] for f in (torch.cos, torch.sin))
    pair = torch.stack([first * cosine - second * sine, second * cosine + first * sine], -2)
    wanted = torch.cat([pair.flatten(-2), queries_keys[..., 2 * pairs :]], -1)
    new_values = projected[:, (heads + kv_heads) * key_size :].clone().view(3, kv_heads, value_size)

    rotate_and_store(
        projected,
        (angles.cos(), angles.sin()),
        positions,
        (blocks, offsets),
        (keys, values),
        heads=heads,
        weights=weights,
    )
    found = projected[:, : (heads + kv_heads) * key_size].view(3, -1, key_size)
    assert_near(found, wanted.to(dtype), dtype)
    assert_near(keys[blocks, :, :, offsets], wanted[:, heads:].to(dtype), dtype)
    assert torch.equal(values[blocks, :, offsets], new_values)
    assert keys.count_nonzero() <= 3 * kv_heads * key_size and values.count_nonzero() <= new_values.numel()


@compiling
def test_layers_compile() -> None:
    from deepspeed.ops.gpu.dropout import dropped
    from deepspeed.ops.gpu.gates import Swiglu
    from deepspeed.ops.gpu.norms import AddedNorm
    from deepspeed.ops.gpu.rotary import rotate_and_store

    def train() -> None:
        dtype = torch.bfloat16
        x, residual = (torch.empty(4, 1024, dtype=dtype, requires_grad=True) for _ in range(2))
        weight, bias = (torch.empty(1024, requires_grad=True) for _ in range(2))
        for ratio in (0.0, 0.1):
            total, out = AddedNorm.apply(x, residual, weight, bias, ratio, 3, 1e-5, True)
            (total.sum() + out.sum()).backward()
        AddedNorm.apply(x, None, weight, None, 0.0, 0, 1e-5, False)[1].sum().backward()
        Swiglu.apply(x, residual).sum().backward()
        dropped(x, 0.1, 2**40, residual)
        pages = torch.empty(9, 2, 64, 16, dtype=dtype), torch.empty(9, 2, 16, 64, dtype=dtype)
        tables = torch.empty(100, 32), torch.empty(100, 32)
        rows = torch.zeros(4, dtype=torch.int64)
        norms = torch.empty(64), torch.empty(64)
        for weights in (None, norms):
            projected = torch.empty(4, 12 * 64, dtype=dtype)
            rotate_and_store(projected, tables, rows, (rows, rows), pages, heads=8, weights=weights)

    assert built(train) == {
        "_norm_kernel",
        "_backward_kernel",
        "_gate_kernel",
        "_swiglu_backward_kernel",
        "_dropout_kernel",
        "_rotary_kernel",
    }
