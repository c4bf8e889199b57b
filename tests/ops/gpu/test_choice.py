"""The public functions use the kernels if tensors are on a GPU, with the same results as on the host.

Without a GPU, this is checked in the interpreter: `usable` is patched to treat host tensors as GPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.ops.gpu.triton_kit import interpreted

Case = Callable[[str], list[Tensor]]


def _given(*shapes: tuple[int, ...], device: str, grad: bool = False) -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=random).to(device) for shape in shapes]
    return [each.requires_grad_() for each in made] if grad else made


def integer_weights(device: str) -> list[Tensor]:
    from deepspeed.inference.kernels import IntegerLinear
    from deepspeed.ops.small_product import QuantizedMatrix

    x, weight, bias = _given((3, 200), (40, 200), (40,), device=device)
    layers = [
        IntegerLinear(QuantizedMatrix.of(weight, bits), bias, torch.float32).to(device) for bits in (8, 4)
    ]
    with torch.no_grad():
        return [layer(x) for layer in layers]


def experts(device: str) -> list[Tensor]:
    from deepspeed.parallel.expert.grouped import grouped_linear

    given = _given((20, 16), (3, 16, 24), (3, 24), device=device, grad=True)
    out = grouped_linear(given[0], given[1], [5, 0, 15], given[2])
    return [out, *torch.autograd.grad(out.square().sum(), given)]


def groups_of_rows(device: str) -> list[Tensor]:
    from deepspeed.ops.triton_ops.group_gemm_triton import group_gemm_triton

    given = _given((9, 16), (3, 24, 16), device=device, grad=True)
    out = group_gemm_triton(*given, torch.tensor([2, 2, 7], device=device), trans_b=True)
    return [out, *torch.autograd.grad(out.square().sum(), given)]


def gate(device: str) -> list[Tensor]:
    from deepspeed.ops.triton_ops.swiglu_triton import swiglu

    given = _given((4, 30), (4, 30), device=device, grad=True)
    out = swiglu(*given)
    return [out, *torch.autograd.grad(out.square().sum(), given)]


def payloads(device: str) -> list[Tensor]:
    from deepspeed.ops.formats.codecs import BlockCodec, SignCodec

    results = []
    for codec in (BlockCodec(8), BlockCodec(4), SignCodec()):
        values, errors = _given((3, 600), (3, 600), device=device)
        made = codec.encode(values, errors)
        results += [made, errors, codec.decode(made, 600), codec.total(made, 600)]
    return results


def small_floats(device: str) -> list[Tensor]:
    from deepspeed.ops.fp_quantizer import FP_Quantize

    results = []
    for bits in (4, 6, 8, 12):
        quantizer, (x,) = FP_Quantize(), _given((3, 700), device=device)
        packed = quantizer.quantize(x, bits)
        codes, scales = quantizer.quantize(x, bits, return_meta_tensor=True)
        results += [packed, codes.view(torch.uint8), scales, quantizer.dequantize(packed, q_bits=bits)]
        results.append(quantizer.dequantize(codes, q_bits=bits, scale=scales))
    return results


def transformer_layer(device: str) -> list[Tensor]:
    from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

    results = []
    for before in (False, True):
        config = DeepSpeedTransformerConfig(
            hidden_size=32, intermediate_size=64, heads=4, num_hidden_layers=1, pre_layer_norm=before
        )
        torch.manual_seed(1)
        layer = DeepSpeedTransformerLayer(config).to(device)
        (x,) = _given((2, 5, 32), device=device, grad=True)
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        results += [out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))]
    return results


CASES: dict[str, tuple[Case, set[str]]] = {
    "integer weights": (integer_weights, {"_weights_kernel"}),
    "experts": (experts, {"_product_kernel", "_matrices_kernel"}),
    "groups of rows": (groups_of_rows, {"_product_kernel", "_matrices_kernel"}),
    "gate": (gate, {"_gate_kernel", "_swiglu_backward_kernel"}),
    "payloads": (payloads, {"_encode_integers_kernel", "_encode_signs_kernel", "_decode_kernel"}),
    "small floats": (small_floats, {"_encode_kernel", "_decode_kernel"}),
    "transformer layer": (transformer_layer, {"_norm_kernel", "_backward_kernel"}),
}


_ROUNDED = {"integer weights": 5e-3}
"""Where the host's kernel rounds: inputs to 15 bits."""


def _compare(name: str, found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        if b.dtype is torch.uint8:
            assert torch.equal(a.cpu(), b)
        else:
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=_ROUNDED.get(name, 1e-5))


@pytest.mark.parametrize("name", CASES)
@interpreted
def test_in_the_interpreter(name: str) -> None:
    from triton.runtime.interpreter import GridExecutor

    case, kernels = CASES[name]
    launched: set[str] = set()
    original = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add(self.fn.__name__)
        return original(self, *args, **kwargs)

    wanted = case("cpu")
    assert not launched
    with (
        mock.patch("deepspeed.ops.gpu.usable", lambda *tensors: True),
        mock.patch.object(GridExecutor, "__call__", call),
    ):
        found = case("cpu")
    assert launched == kernels
    _compare(name, found, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    case, _ = CASES[name]
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        _compare(name, case("cuda"), case("cpu"))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_the_host_has_nothing_to_do_with_it() -> None:
    from deepspeed.ops import gpu

    assert not gpu.usable() and not gpu.usable(None) and not gpu.usable(torch.ones(1), None)
