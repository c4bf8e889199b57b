"""Small floating-point numbers against their definition, written out number by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepspeed.ops import native
from deepspeed.ops.formats.packing import pack_bits, unpack_bits
from deepspeed.ops.formats.small_floats import FORMATS
from deepspeed.ops.fp_quantizer import FP_Quantize, matmul_fp8
from deepspeed.transforms.lora import QuantizationConfig

LARGEST = {4: 6.0, 6: 28.0, 8: 448.0, 12: 2.0**64 * 1.9375}


def by_definition(bits: int) -> list[float]:
    """(-1)^sign 2^(exponent - bias) (1 + mantissa / 2^m), and subnormal numbers, by code."""
    exponent_bits, mantissa_bits = {4: (2, 1), 6: (3, 2), 8: (4, 3), 12: (7, 4)}[bits]
    bias, found = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (bits - 1)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        found.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
    if bits == 8:
        found[-1] = math.nan
    return found


@pytest.mark.parametrize("bits", FORMATS)
def test_every_code_stands_for_its_number(bits: int) -> None:
    expected = torch.tensor(by_definition(bits))
    table = FORMATS[bits].table(torch.device("cpu"))
    torch.testing.assert_close(table, torch.cat([expected, -expected]), rtol=0, atol=0, equal_nan=True)
    assert FORMATS[bits].largest == LARGEST[bits]
    assert FORMATS[bits].bits == bits


@pytest.mark.parametrize("bits", FORMATS)
def test_every_number_and_what_lies_between_is_rounded_as_defined(bits: int) -> None:
    numbers = torch.tensor([x for x in by_definition(bits) if not math.isnan(x)], dtype=torch.float64)
    middle = (numbers[1:] + numbers[:-1]) / 2
    near = [middle.float(), torch.nextafter(middle.float(), torch.tensor(0.0)), middle.float() * (1 + 2**-23)]
    x = torch.cat([numbers.float(), *near, numbers[-1:].float() * 1.01])
    x = torch.cat([x, -x])
    even_first = nearest(x.double(), numbers)
    found = FORMATS[bits].encode(x)
    assert torch.equal(found & ((1 << (bits - 1)) - 1), even_first.to(torch.int32))
    assert torch.equal(found >> (bits - 1) == 1, torch.signbit(x))
    if bits == 8:
        clamped = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)
        assert torch.equal(found, clamped)
    within = x[x.abs() <= LARGEST[bits]]  # a group with a scale of 1
    within = within[: len(within) // 4 * 4]
    quantizer = FP_Quantize(QuantizationConfig(group_size=len(within)))
    codes, scale = quantizer.quantize(within, q_bits=bits, return_meta_tensor=True)
    assert scale.tolist() == [[1.0]]
    assert torch.equal(
        unpack_bits(codes.view(1, -1), bits)[0].int(), found[x.abs() <= LARGEST[bits]][: len(within)]
    )


@pytest.mark.parametrize("bits", FORMATS)
def test_every_code_is_read(bits: int) -> None:
    codes = torch.arange(1 << bits, dtype=torch.int32)
    quantizer = FP_Quantize(QuantizationConfig(group_size=len(codes)))
    packed, values = pack_bits(codes.view(1, -1), bits), torch.empty(len(codes))
    quantizer.dequantize(packed, fp_out=values, q_bits=bits, scale=torch.tensor([[0.5]]))
    expected = torch.tensor(by_definition(bits))
    expected = torch.cat([expected, -expected]) / 2
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values.signbit()[codes != 127], expected.signbit()[codes != 127])


@pytest.mark.parametrize("bits", FORMATS)
def test_packing(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 24), dtype=torch.int32)
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 24 * bits // 8)
    assert torch.equal(unpack_bits(packed, bits).int(), codes)
    first = sum(int(code) << (bits * at) for at, code in enumerate(codes[0]))
    assert bytes(packed[0].tolist()) == first.to_bytes(24 * bits // 8, "little")


def nearest(x: Tensor, numbers: Tensor) -> Tensor:
    """The code of the nearest of ``numbers``, the even one of two."""
    distance = (x.abs()[..., None] - numbers).abs()
    candidates = distance == distance.amin(-1, keepdim=True)
    code = torch.arange(len(numbers))
    return torch.where(candidates, (code % 2) * len(numbers) + code, 1 << 20).argmin(-1)


def expected_round_trip(x: Tensor, bits: int, group: int) -> Tensor:
    numbers = torch.tensor([v for v in by_definition(bits) if not math.isnan(v)], dtype=torch.float64)
    flat = x.float().reshape(-1, group)
    scale = flat.abs().amax(1, keepdim=True) / LARGEST[bits]
    scaled = (flat / scale).double()
    return (numbers[nearest(scaled, numbers)].float() * scaled.sign().float() * scale).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("bits", FORMATS)
def test_round_trip(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 96) * torch.tensor([1e-3, 1.0, 50.0, 0.2])[:, None]).to(dtype)
    quantizer = FP_Quantize(QuantizationConfig(group_size=48))
    packed = quantizer.quantize(x, q_bits=bits)
    assert packed.dtype == torch.uint8 and packed.shape == (8, 48 * bits // 8 + 4)
    back = quantizer.dequantize(packed, q_bits=bits)
    assert back.dtype == dtype and back.shape == x.shape
    torch.testing.assert_close(back, expected_round_trip(x, bits, 48).to(dtype), rtol=0, atol=0)
    codes, scales = quantizer.quantize(x, q_bits=bits, return_meta_tensor=True)
    assert torch.equal(scales, quantizer.get_scales()) and scales.shape == (8, 1)
    assert torch.equal(quantizer.dequantize(codes, q_bits=bits, scale=scales), back)
    out = torch.empty(4, 96)
    assert quantizer.dequantize(packed, fp_out=out, q_bits=bits) is out
    assert torch.equal(out.to(dtype), back)


@pytest.mark.parametrize("bits", FORMATS)
def test_kernel_and_pytorch_give_the_same_bytes(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every instruction set and any number of threads, with groups larger than what is encoded at once. The bits of
    what is not a number may differ."""
    lib = native.library()
    if lib is None:
        pytest.skip("built without native kernels")
    quantizers = [FP_Quantize(QuantizationConfig(group_size=group)) for group in (512, 12, 2052)]
    scales = 10.0 ** torch.empty(70_003).uniform_(-9, 4)
    inputs = [(torch.randn(70_003) * scales).to(d) for d in (torch.float32, torch.bfloat16, torch.float16)]
    inputs = [torch.where(torch.rand(70_003) < 0.01, -0.0, x) for x in inputs]
    inputs[0][900:960] = 1e-42
    infinite = inputs[0].clone()
    infinite[[5, 600]] = torch.tensor([torch.inf, torch.nan])

    def everything() -> list[Tensor]:
        found = []
        for quantizer in quantizers:
            for x in [*inputs, infinite]:
                packed = quantizer.quantize(x, q_bits=bits)
                codes, scale = quantizer.quantize(x, q_bits=bits, return_meta_tensor=True)
                found += [packed, codes, scale.view(torch.uint8)]
                for back in (
                    quantizer.dequantize(packed, q_bits=bits),
                    quantizer.dequantize(codes, q_bits=bits, scale=scale),
                ):
                    found.append(back.masked_fill_(back.isnan(), torch.nan).view(torch.uint8))
        return found

    results, best, threads = [], lib.ds_isa(), torch.get_num_threads()
    try:
        for isa, count in [*((isa, 1) for isa in range(best + 1)), (best, 2)]:
            assert lib.ds_set_isa(isa) == isa
            torch.set_num_threads(count)
            results.append(everything())
    finally:
        lib.ds_set_isa(best)
        torch.set_num_threads(threads)
    monkeypatch.setattr(native, "library", lambda: None)
    expected = everything()
    for found in results:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bits", [6, 8, 12])
def test_every_bfloat16_by_definition(bits: int) -> None:
    """All up to a largest number, zeros and subnormal ones among them."""
    bits_of_largest = [0x3F80, 0x3F81, 0x3FB5, 0x3FFF, 0x0123, 0x2080, 0x5FAB, 0x7F7F]
    for last in [*bits_of_largest, *torch.randint(0x1000, 0x7F7F, (20,)).tolist()]:
        magnitudes = torch.arange(last, last - (last + 1) // 4 * 4, -1, dtype=torch.int16).view(
            torch.bfloat16
        )
        x = torch.where(torch.rand(len(magnitudes)) < 0.5, -magnitudes, magnitudes)
        quantizer = FP_Quantize(QuantizationConfig(group_size=len(x)))
        codes, scale = quantizer.quantize(x, q_bits=bits, return_meta_tensor=True)
        expected = FORMATS[bits].encode(x.float() / scale.view(()))
        assert torch.equal(unpack_bits(codes.view(1, -1), bits)[0].int(), expected)


def test_rows_of_a_choice() -> None:
    x = torch.randn(6, 2, 32)
    quantizer = FP_Quantize(QuantizationConfig(group_size=32))
    for bits in FORMATS:
        packed = quantizer.quantize(x, q_bits=bits)
        chosen = torch.tensor([4, 0, 4])
        whole = quantizer.dequantize(packed, q_bits=bits)
        assert torch.equal(quantizer.selective_dequantize(packed, chosen, q_bits=bits), whole[chosen])
    codes, scales = quantizer.quantize(x, q_bits=12, return_meta_tensor=True)
    assert torch.equal(quantizer.selective_dequantize(codes, chosen, q_bits=12, scale=scales), whole[chosen])


def test_sizes_that_groups_do_not_divide_and_zeros() -> None:
    quantizer = FP_Quantize(QuantizationConfig(group_size=64))
    x = torch.randn(3, 50)
    x[1] = 0.0
    for bits in FORMATS:
        back = quantizer.dequantize(quantizer.quantize(x, q_bits=bits), q_bits=bits)
        assert back.shape == x.shape and not back[1].any()
    nothing = torch.zeros(128)
    assert torch.equal(quantizer.dequantize(quantizer.quantize(nothing)), nothing)


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    torch.manual_seed(0)
    quantizer = FP_Quantize(QuantizationConfig(group_size=512))
    x = torch.full((200, 512), 0.3)
    x[:, 0] = 1.0
    for bits in (6, 8):
        back = quantizer.dequantize(quantizer.quantize(x, q_bits=bits, stochastic_mode=True), q_bits=bits)
        assert len(back[:, 1:].unique()) == 2
        assert back[:, 1:].mean().item() == pytest.approx(0.3, rel=1e-3)


def test_products_with_a_quantized_matrix() -> None:
    matrix, x = torch.randn(64, 32), torch.randn(5, 64)
    quantizer = FP_Quantize(QuantizationConfig(group_size=64))
    codes, scales = quantizer.quantize(matrix, return_meta_tensor=True)
    assert codes.shape == matrix.shape
    expected = x @ quantizer.dequantize(codes, scale=scales)
    assert torch.equal(matmul_fp8(x, codes, scales, 64, quantizer), expected)
    with pytest.raises(ValueError, match="quantization_group_size=32"):
        matmul_fp8(x, codes, scales, 32, quantizer)


def test_what_cannot_be_quantized_is_refused() -> None:
    quantizer = FP_Quantize(QuantizationConfig(group_size=10))
    with pytest.raises(ValueError, match="q_bits=5"):
        quantizer.quantize(torch.zeros(10), q_bits=5)
    with pytest.raises(ValueError, match="multiple of 4"):
        quantizer.quantize(torch.zeros(10), q_bits=6)
    with pytest.raises(RuntimeError, match="fp_out"):
        quantizer.dequantize(torch.zeros(10, dtype=torch.uint8))


def test_the_size_of_groups_may_be_given_alone() -> None:
    values = torch.randn(4, 256)
    expected = FP_Quantize(QuantizationConfig(group_size=128)).quantize(values)
    for quantizer in (FP_Quantize(group_size=128), FP_Quantize(128)):
        assert torch.equal(quantizer.quantize(values), expected)


@pytest.mark.parametrize("bits", [6, 8])
def test_so_many_that_they_go_past_the_cache(bits: int, isa: str) -> None:
    """The same numbers as of parts, each of which is small."""
    group, numel = 512, (4 << 20) + 1024
    quantizer = FP_Quantize(QuantizationConfig(q_bits=bits, group_size=group))
    x = torch.randn(numel, generator=torch.Generator().manual_seed(bits)).bfloat16()
    packed = quantizer.quantize(x, q_bits=bits)
    found = quantizer.dequantize(packed, q_bits=bits)
    parts = [
        quantizer.dequantize(quantizer.quantize(part, q_bits=bits), q_bits=bits)
        for part in x.split(1024 * group)
    ]
    assert torch.equal(found, torch.cat(parts))
