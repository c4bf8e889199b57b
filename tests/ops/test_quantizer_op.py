"""Functions of `QuantizerBuilder().load()`, compared with their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspeed.ops import native
from deepspeed.ops.op_builder import QuantizerBuilder
from deepspeed.zero.gathering.init_context import CUDAQuantizer

OP = QuantizerBuilder().load()
BITS = pytest.mark.parametrize("bits", [8, 4])
KINDS = pytest.mark.parametrize("kind", list(OP.QuantizationType))


def codes_of(data: Tensor, bits: int) -> Tensor:
    """Every code of ``data`` [..., bytes] as an integer of Python's, two to a byte with 4 bits, the first below."""
    if bits == 8:
        return data.flatten().double()
    both = [(byte & 15, byte >> 4 & 15) for byte in data.flatten().tolist()]
    return torch.tensor([code - 16 if code > 7 else code for pair in both for code in pair]).double()


def by_definition(data: Tensor, params: Tensor, bits: int) -> Tensor:
    codes = codes_of(data, bits).view(params.shape[0], -1)
    offset = params[:, 1:].double() if params.shape[1] == 2 else 0.0
    return codes * params[:, :1].double() + offset


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@KINDS
@BITS
def test_codes_and_parameters_stand_for_the_values(bits, kind, dtype, library, monkeypatch):
    if not library:
        monkeypatch.setattr(native, "library", lambda: None)
    given = (torch.randn(6, 64) + 2).to(dtype)
    codes, params = OP.quantize(given, 12, bits, kind)
    assert codes.dtype == torch.int8 and codes.shape == (6, 64 * bits // 8)
    assert params.dtype == torch.float32 and params.shape == (12, 1 + (kind == OP.Asymmetric))
    expected, wide = by_definition(codes, params, bits), given.double().view(12, -1)
    assert bool(((expected - wide).abs() <= params[:, :1] * 0.5001 + 1e-6).all())
    span = wide.amax(1) - wide.amin(1) if kind == OP.Asymmetric else 2 * wide.abs().amax(1)
    # of all codes the symmetric ones leave out the least, which has no positive counterpart
    torch.testing.assert_close(
        params[:, 0].double() * (2**bits - (1 if kind else 2)), span, rtol=1e-5, atol=0
    )
    for decode, wanted in ((OP.dequantize_fp32, torch.float32), (OP.dequantize, torch.float16)):
        found = decode(codes, params, 12, bits, kind)
        assert found.shape == given.shape
        torch.testing.assert_close(found, expected.view(6, 64).to(wanted), rtol=2e-3, atol=1e-5)


@KINDS
def test_groups_of_an_odd_number_of_elements_in_8_bits(kind):
    given = torch.randn(3, 35)
    codes, params = OP.quantize(given, 15, 8, kind)
    expected = by_definition(codes, params, 8)
    assert bool(((expected - given.double().view(15, 7)).abs() <= params[:, :1] * 0.5001).all())
    found = OP.dequantize_fp32(codes, params, 15, 8, kind)
    torch.testing.assert_close(found.double(), expected.view(3, 35), rtol=1e-6, atol=1e-6)


@KINDS
@BITS
def test_zeros_and_constants_are_kept(bits, kind):
    for value in (0.0, 1.5):
        given = torch.full((32,), value)
        torch.testing.assert_close(
            OP.dequantize_fp32(*OP.quantize(given, 2, bits, kind), 2, bits, kind), given
        )


@BITS
def test_what_is_not_finite_does_not_become_finite(bits):
    given = torch.ones(32)
    given[3] = torch.inf
    for kind in OP.QuantizationType:
        found = OP.dequantize_fp32(*OP.quantize(given, 2, bits, kind), 2, bits, kind)
        assert not found[:16].isfinite().any() and torch.equal(found[16:], given[16:])


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: OP.quantize(torch.ones(8), 2, 3, OP.Symmetric), "num_bits=3"),
        (lambda: OP.quantize(torch.ones(8), 3, 8, OP.Symmetric), "groups=3"),
        (lambda: OP.quantize(torch.ones(4, 3), 2, 4, OP.Symmetric), "is odd"),
        (lambda: OP.dequantize(torch.ones(8, dtype=torch.int8), torch.ones(3), 2, 8, OP.Symmetric), "3"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("numel", "groups"), [(64, 1), (8002, 2), (3 * 8000, 3), (30_030, 5), (9, 1), (8009, 1)]
)
def test_weights_choose_their_groups(numel, groups):
    quantizer, given = CUDAQuantizer(), torch.randn(numel)
    codes, scale = quantizer.quantize(given)
    assert scale.numel() == groups
    found = quantizer.dequantize(codes, scale, torch.float32)
    assert bool(((found - given).view(len(scale), -1).abs() <= scale * 0.5001).all())
    assert quantizer.dequantize(codes, scale).dtype == torch.float16
    assert quantizer.quantize(given, numel)[1].numel() == numel
    with pytest.raises(ValueError, match="groups=999"):
        quantizer.quantize(given, 999)
