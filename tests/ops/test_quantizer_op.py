"""What `QuantizerBuilder().load()` has, against the definition of its numbers."""

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


@KINDS
@BITS
def test_swizzled_groups_come_by_pipeline_device_and_node(bits, kind):
    nodes, devices, pipeline, each = 2, 3, 2, 2
    groups = nodes * devices * pipeline * each
    given = torch.randn(groups * 8)
    codes, params = OP.quantize(given, groups, bits, kind)
    by_group = codes.view(groups, -1)
    order = [
        ((node * devices + device) * pipeline + part) * each + number
        for part in range(pipeline)
        for device in range(devices)
        for node in range(nodes)
        for number in range(each)
    ]
    found, found_params = OP.swizzle_quant(given, groups, bits, kind, pipeline, nodes, devices)
    assert torch.equal(found, torch.cat([by_group[group] for group in order]))
    assert torch.equal(found_params, params[order])


@KINDS
@BITS
def test_a_reduction_quantizes_the_sum(bits, kind):
    devices, numel = 4, 96
    given = torch.randn(devices, numel)
    codes, params = OP.quantize(given.flatten(), devices * 6, bits, kind)
    total = OP.dequantize_fp32(codes, params, devices * 6, bits, kind).view(devices, numel).sum(0)
    found, found_params = OP.quantized_reduction(codes, params, devices * 6, 3, bits, kind, devices)
    expected, expected_params = OP.quantize(total, 3, bits, kind)
    assert torch.equal(found, expected) and torch.equal(found_params, expected_params)


def test_the_exchange_of_zeropp_gives_the_mean_of_gradients():
    """Both steps of a hierarchical reduction, by hand: 2 nodes of 2 ranks."""
    nodes, devices, numel, bits, kind = 2, 2, 64, 4, OP.Symmetric
    world, groups = nodes * devices, 8
    given = torch.randn(world, numel)
    sent = [OP.swizzle_quant(grads, groups, bits, kind, 1, nodes, devices) for grads in given]

    def share(tensor: Tensor, number: int, of: int) -> Tensor:
        return tensor.flatten().chunk(of)[number]

    for rank in range(world):
        node, device = divmod(rank, devices)
        partial = []  # of every node, what its rank with this number holds after the exchange within the node
        for other in range(nodes):
            received = [sent[other * devices + peer] for peer in range(devices)]
            codes, scales = (
                torch.cat([share(each[i], device, devices) for each in received]) for i in (0, 1)
            )
            partial.append(OP.quantized_reduction(codes, scales, groups, 4, bits, kind, devices))
        codes, scales = (torch.cat([share(each[i], node, nodes) for each in partial]) for i in (0, 1))
        found = OP.dequantize_fp32(codes, scales, scales.numel(), bits, kind).view(nodes, -1).sum(0) / world
        expected = given.mean(0).chunk(world)[rank]
        assert (found - expected).norm() < 0.15 * expected.norm() + 0.1


def test_unsigned_codes_above_a_least_value():
    scale, least = torch.tensor([0.5, 2.0]).half(), torch.tensor([-1.0, 3.0]).half()
    codes = torch.tensor([[0, 1, 15, 8], [3, 2, 1, 0]], dtype=torch.uint8)
    expected = (codes * scale[:, None] + least[:, None]).half()
    assert torch.equal(OP.dequantize_int8_to_half_experimental(codes, scale, least, 2, 4), expected)
    packed = codes[:, 0::2] << 4 | codes[:, 1::2]
    assert torch.equal(OP.dequantize_int4_to_half_experimental(packed, scale, least, 2, 4), expected)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: OP.quantize(torch.ones(8), 2, 3, OP.Symmetric), "num_bits=3"),
        (lambda: OP.quantize(torch.ones(8), 3, 8, OP.Symmetric), "groups=3"),
        (lambda: OP.quantize(torch.ones(4, 3), 2, 4, OP.Symmetric), "is odd"),
        (lambda: OP.dequantize(torch.ones(8, dtype=torch.int8), torch.ones(3), 2, 8, OP.Symmetric), "3"),
        (lambda: OP.swizzle_quant(torch.ones(24), 3, 8, OP.Symmetric, 1, 2, 2), "= 4"),
        (
            lambda: OP.quantized_reduction(
                torch.ones(9, dtype=torch.int8), torch.ones(3), 3, 1, 8, OP.Symmetric, 2
            ),
            "devices_per_node=2",
        ),
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
