"""Triton kernels for the Evoformer's attention against dense attention in fp64, with the gradients of five inputs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention, evoformer_attn
from tests.ops.gpu.attention_cases import attention, built_everywhere, close, drawn
from tests.ops.gpu.triton_kit import built, compiling, interpreted

NAMES = ("query", "key", "value", "bias 1", "bias 2")
CASES: dict[str, dict[str, Any]] = {
    "no bias": {"used": ()},
    "mask": {"used": (0,)},
    "pairs": {"used": (1,), "keys": 45},
    "both": {"rows": 70, "keys": 37},
    "odd head size": {"size": 10},
    "one token": {"rows": 1, "keys": 1},
    "one key": {"rows": 40, "keys": 1},
    "long": {"rows": 130, "keys": 150, "batch": 1, "sequences": 1},
    "many sequences": {"rows": 5, "keys": 17, "sequences": 7},
    "a sequence that sees nothing": {"hidden": True},
    "fp16": {"dtype": torch.float16, "size": 32},
    "bf16": {"dtype": torch.bfloat16},
}


def inputs(
    rows: int = 33,
    keys: int = 33,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    used: tuple[int, ...] = (0, 1),
    hidden: bool = False,
    batch: int = 2,
    sequences: int = 2,
    heads: int = 2,
) -> tuple[list[Tensor], list[Tensor | None]]:
    main = [drawn(batch, sequences, tokens, heads, size, dtype=dtype) for tokens in (rows, keys, keys)]
    shapes = ((batch, sequences, 1, 1, keys), (batch, 1, heads, rows, keys))
    biases = [drawn(*shape, dtype=dtype) if at in used else None for at, shape in enumerate(shapes)]
    if hidden and biases[0] is not None:
        with torch.no_grad():
            biases[0][0, 0] = -torch.inf
            biases[0][..., 5:9] = -torch.inf
    return main, biases


def plain(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None) -> Tensor:
    bias = torch.zeros((), dtype=torch.float64)
    for each in biases:
        bias = bias if each is None else bias + each.double()
    return attention(*(x.transpose(2, 3) for x in (q, k, v)), bias, q.shape[-1] ** -0.5).transpose(2, 3)


@pytest.mark.parametrize("case", CASES)
@interpreted
def test_values_and_gradients(case: str) -> None:
    main, biases = inputs(**CASES[case])
    dtype = main[0].dtype
    with mock.patch.object(evoformer_attn, "usable", lambda *_: True):
        found = DS4Sci_EvoformerAttention(*main, biases)
        expected = plain(*main, *biases)
        close(found, expected, dtype, "output")
        of = [x for x in (*main, *biases) if x is not None]
        names = [name for name, x in zip(NAMES, (*main, *biases), strict=True) if x is not None]
        grad = torch.randn(expected.shape).to(dtype)
        mine = torch.autograd.grad(found, of, grad)
    for name, one, other in zip(names, mine, torch.autograd.grad(expected, of, grad.double()), strict=True):
        close(one, other.nan_to_num(), dtype, name)


@interpreted
def test_a_mask_needs_no_gradient_and_tensors_no_order() -> None:
    """Inputs and biases that lie otherwise in memory."""
    main, biases = inputs(rows=20, keys=20)
    assert biases[0] is not None and biases[1] is not None
    lying = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in main]
    mask, pairs = biases[0].detach(), biases[1].detach().mT.contiguous().mT.requires_grad_()
    with mock.patch.object(evoformer_attn, "usable", lambda *_: True):
        found = DS4Sci_EvoformerAttention(*lying, [mask, pairs])
        mine = torch.autograd.grad(found.square().sum(), [*lying, pairs])
    expected = plain(*main, *biases)
    wanted = torch.autograd.grad(expected.square().sum(), [*main, biases[1]])
    for name, one, other in zip((*NAMES[:3], "bias 2"), mine, wanted, strict=True):
        close(one, other, torch.float32, name)


def launch(dtype: torch.dtype, size: int, used: tuple[int, ...]) -> None:
    main, biases = inputs(dtype=dtype, size=size, used=used)
    with mock.patch.object(evoformer_attn, "usable", lambda *_: True):
        DS4Sci_EvoformerAttention(*main, biases).sum().backward()


@compiling
def test_kernels_compile() -> None:
    names = {"_forward", "_query_gradient", "_key_gradients", "_pairs_gradient"}
    assert built(lambda: launch(torch.bfloat16, 32, (0, 1))) == names


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@compiling
def test_kernels_compile_for_all_tiles(dtype: torch.dtype, size: int) -> None:
    assert len(built_everywhere(lambda: launch(dtype, size, (0, 1)))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("used", [(), (0,), (1,)], ids=str)
@compiling
def test_kernels_compile_without_biases(used: tuple[int, ...]) -> None:
    built(lambda: launch(torch.float16, 32, used))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str) -> None:
    torch.manual_seed(0)
    main, biases = inputs(**CASES[case])
    of = [x for x in (*main, *biases) if x is not None]
    there = [x if x is None else x.detach().cuda().requires_grad_() for x in (*main, *biases)]
    found, expected = DS4Sci_EvoformerAttention(*there[:3], there[3:]), plain(*main, *biases)
    close(found.cpu(), expected, main[0].dtype)
    grad = torch.randn(expected.shape).to(main[0].dtype)
    mine = torch.autograd.grad(found, [x for x in there if x is not None], grad.cuda())
    for one, other in zip(mine, torch.autograd.grad(expected, of, grad.double()), strict=True):
        close(one.cpu(), other.nan_to_num(), main[0].dtype)
