"""Norms, activations and products that write where they are told."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from deepspeed.inference.v2.inference_utils import ActivationType as Kind
from deepspeed.inference.v2.kernels import core_ops

FUNCTIONS = {
    Kind.IDENTITY: lambda x: x,
    Kind.GELU: lambda x: F.gelu(x, approximate="tanh"),
    Kind.RELU: F.relu,
    Kind.SILU: F.silu,
}
GATES = {Kind.GEGLU: Kind.GELU, Kind.ReGLU: Kind.RELU, Kind.SiGLU: Kind.SILU}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("dtype", core_ops.HALVES)
def test_bias_and_function_in_place(kind: Kind, dtype: torch.dtype) -> None:
    inputs, bias = torch.randn(5, 16, dtype=dtype), torch.randn(16, dtype=dtype)
    expected = FUNCTIONS[kind](inputs.float() + bias.float()).to(dtype)
    made = core_ops.CUDABiasActivation(16, dtype, kind)(inputs, bias)
    assert made is inputs and torch.equal(inputs, expected)


@pytest.mark.parametrize("kind", GATES)
def test_gates_of_neighbouring_channels(kind: Kind) -> None:
    inputs, bias, output = torch.randn(3, 4, 16), torch.randn(16), torch.empty(3, 4, 8)
    core_ops.CUDAGatedActivation(8, torch.float32, kind)(output, inputs, bias)
    wide = inputs + bias
    torch.testing.assert_close(output, FUNCTIONS[GATES[kind]](wide[..., ::2]) * wide[..., 1::2])


@pytest.mark.parametrize("dtype", core_ops.FLOATS)
def test_norms_of_sums(dtype: torch.dtype) -> None:
    x, y, gamma, beta = (torch.randn(5, 8, dtype=dtype) for _ in range(4))
    gamma, beta, total = gamma[0], beta[0], x.float() + y.float()
    layer = F.layer_norm(total, (8,), gamma.float(), beta.float(), 1e-5).to(dtype)
    rms = F.rms_norm(total, (8,), gamma.float(), 1e-5).to(dtype)
    for made, expected in (
        (core_ops.CUDAFPPreLN(8, dtype)(x.clone(), y.clone(), x, y, gamma, beta), layer),
        (core_ops.CUDARMSPreNorm(8, dtype)(x.clone(), y.clone(), x, y, gamma), rms),
    ):
        assert torch.equal(made[0], total.to(dtype)) and torch.equal(made[1], expected)
    into = x.clone()
    assert torch.equal(core_ops.CUDAFPPostLN(8, dtype)(into, into, y, gamma, beta), layer)
    alone = F.layer_norm(x.float(), (8,), gamma.float(), beta.float(), 1e-5).to(dtype)
    assert torch.equal(core_ops.CUDAFPLN(8, dtype)(torch.empty_like(x), x, gamma, beta), alone)
    alone = F.rms_norm(x.float(), (8,), gamma.float(), 1e-5).to(dtype)
    assert torch.equal(core_ops.CUDARMSNorm(8, dtype)(torch.empty_like(x), x, gamma), alone)


def test_products_and_mistakes() -> None:
    inputs, weight, output = torch.randn(2, 3, 8), torch.randn(8, 4).t(), torch.empty(2, 3, 4)
    core_ops.BlasLibLinear(torch.float32)(output, inputs, weight)
    torch.testing.assert_close(output, inputs @ weight.t())
    for make, told in (
        (lambda: core_ops.BlasLibLinear(torch.int8), "torch.int8"),
        (lambda: core_ops.CUDARMSNorm(3, torch.float32), "channels=3"),
        (lambda: core_ops.CUDABiasActivation(8, torch.float32, Kind.RELU), "torch.float32"),
        (lambda: core_ops.CUDABiasActivation(12, torch.float16, Kind.RELU), "channels=12"),
        (lambda: core_ops.CUDABiasActivation(8, torch.float16, Kind.GEGLU), "CUDAGatedActivation"),
        (lambda: core_ops.CUDAGatedActivation(8, torch.float16, Kind.GELU), "CUDABiasActivation"),
    ):
        with pytest.raises(ValueError, match=told):
            make()
