"""Products of stacked experts against a plain loop over them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from deepspeed.parallel.expert.grouped import grouped_linear

COUNTS = (3, 0, 5, 1, 0)


def plainly(rows: Tensor, weight: Tensor, counts: tuple[int, ...], bias: Tensor | None) -> Tensor:
    made = [run @ w for run, w in zip(rows.split(counts), weight.unbind(0), strict=True)]
    if bias is not None:
        made = [each + b for each, b in zip(made, bias.unbind(0), strict=True)]
    return torch.cat(made)


def inputs(transposed: bool, biased: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    shape = (len(COUNTS), 4, 6) if transposed else (len(COUNTS), 6, 4)
    weight = torch.randn(shape, dtype=dtype, requires_grad=True)
    bias = torch.randn(len(COUNTS), 6, dtype=dtype, requires_grad=True) if biased else None
    return torch.randn(sum(COUNTS), 4, dtype=dtype, requires_grad=True), weight, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_equals_a_loop_over_experts(transposed: bool, biased: bool, dtype: torch.dtype) -> None:
    rows, weight, bias = inputs(transposed, biased, dtype)
    leaves = [each for each in (rows, weight, bias) if each is not None]
    laid = weight if transposed else weight.transpose(1, 2)
    found, wanted = grouped_linear(rows, laid, COUNTS, bias), plainly(rows, laid, COUNTS, bias)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, wanted, **tolerance)
    direction = torch.randn_like(wanted)
    for own, other in zip(
        torch.autograd.grad(found, leaves, direction),
        torch.autograd.grad(wanted, leaves, direction),
        strict=True,
    ):
        torch.testing.assert_close(own, other, **tolerance)
        assert own.is_contiguous()


def test_only_what_is_trained_gets_a_gradient() -> None:
    rows, weight, _ = inputs(True, False, torch.float32)
    grouped_linear(rows, weight.detach(), COUNTS).sum().backward()
    assert rows.grad is not None and weight.grad is None
    grouped_linear(rows.detach(), weight, COUNTS).sum().backward()
    assert weight.grad is not None and not weight.grad[1].any() and weight.grad[0].any()


def test_no_rows_at_all() -> None:
    _, weight, bias = inputs(True, True, torch.float32)
    rows = torch.zeros(0, 4, requires_grad=True)
    grouped_linear(rows, weight, (0,) * len(COUNTS), bias).sum().backward()
    assert not weight.grad.any() and not bias.grad.any()  # type: ignore[union-attr]


def test_flops_are_those_of_the_rows() -> None:
    rows, weight, _ = inputs(True, False, torch.float32)
    with FlopCounterMode(display=False) as counter:
        grouped_linear(rows, weight, COUNTS).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * sum(COUNTS) * 4 * 6


def test_autocast() -> None:
    rows, weight, bias = inputs(False, True, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = grouped_linear(rows, weight.transpose(1, 2), COUNTS, bias)
        wanted = plainly(rows, weight.transpose(1, 2), COUNTS, bias)
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)
