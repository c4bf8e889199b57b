"""Dropout by a seed: shares, gradients, bits, and what it keeps for backward."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from deepspeed.ops import native
from deepspeed.ops.transformer.transformer import dropout, dropped, runs_here

needs_library = pytest.mark.skipif(native.library() is None, reason="built without native kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_shares_values_and_gradients(ratio: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.rand(300, 1001) + 0.5).to(dtype).requires_grad_()
    residual = torch.randn(300, 1001).to(dtype).requires_grad_()
    torch.manual_seed(1)
    plain = dropout(x, ratio)
    torch.manual_seed(1)
    out = dropout(x, ratio, residual)
    kept = plain != 0
    assert abs(float(kept.double().mean()) - (1 - ratio)) < 0.003
    columns = kept.double().mean(0)
    assert float(columns.std()) < 1.3 * (ratio * (1 - ratio) / 300) ** 0.5  # no pattern along the rows
    scaled = (x.detach().float() * (1 / (1 - ratio))).to(dtype)
    torch.testing.assert_close(plain[kept], scaled[kept])
    summed = (x.detach().float() * (1 / (1 - ratio))) * kept + residual.detach().float()  # rounded once
    torch.testing.assert_close(out.detach(), summed.to(dtype))
    grad = torch.randn(300, 1001).to(dtype)
    of_x, of_residual = torch.autograd.grad(out, (x, residual), grad)
    assert torch.equal(of_residual, grad)
    assert not of_x[~kept].any()
    expected = (grad.float() * (1 / (1 - ratio))).to(dtype)
    torch.testing.assert_close(of_x[kept], expected[kept])


def test_seeds_come_from_torch() -> None:
    x = torch.ones(1000)
    torch.manual_seed(3)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(first, second)


@needs_library
def test_bits_depend_neither_on_threads_nor_on_the_instruction_set() -> None:
    lib = native.library()
    assert lib is not None
    best, threads = lib.ds_isa(), torch.get_num_threads()
    x, residual = torch.randn(200_003), torch.randn(200_003)
    results = []
    try:
        for isa, count in [*((isa, 1) for isa in range(best + 1)), (best, 2), (best, 3)]:
            assert lib.ds_set_isa(isa) == isa
            torch.set_num_threads(count)
            results.append(dropped(x, 0.3, 12345678901234, residual))
    finally:
        lib.ds_set_isa(best)
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


@needs_library
def test_it_keeps_nothing_for_backward() -> None:
    kept: list[torch.Tensor] = []
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        dropout(x, 0.1, x)
    assert not kept


def test_elsewhere_it_is_the_dropout_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    x, residual = torch.randn(100), torch.randn(100)
    assert not runs_here(x, 0.1)
    torch.manual_seed(0)
    found = dropout(x, 0.1, residual)
    torch.manual_seed(0)
    assert torch.equal(found, functional.dropout(x, 0.1) + residual)
    assert torch.equal(dropout(x, 0.0, residual), x + residual)
    assert dropout(x, 0.0) is x
