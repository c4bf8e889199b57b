"""Small floats, and moments in one byte: the bits of the references in PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspeed.ops.adam.compact_adam import CompactAdam
from deepspeed.ops.formats.packing import unpack_bits
from deepspeed.ops.formats.small_floats import FORMATS
from deepspeed.ops.fp_quantizer import FP_Quantize
from tests.ops.gpu.triton_kit import built, compiling, interpreted


def quantizer(group: int) -> FP_Quantize:
    made = FP_Quantize()
    made.group_size = group
    return made


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@interpreted
def test_small_floats(bits: int, dtype: torch.dtype) -> None:
    from deepspeed.ops.gpu import small_floats

    form = FORMATS[bits]
    for numel, group in ((1000, 512), (96, 24), (5, 16)):
        x = (torch.randn(numel) * 10.0 ** torch.randint(-9, 9, (numel,))).to(dtype)
        x[:3] = torch.tensor([0.0, -0.0, 1e-41])
        if numel == 96:
            x[24:48] = 0.0
        reference = quantizer(group)
        codes, scales = reference.quantize(x, bits, return_meta_tensor=True)
        parts = form.exponent, form.mantissa, form.codes
        found, found_scales = small_floats.encode(x, group, *parts, form.largest, seed=None)
        assert torch.equal(found_scales, scales) and torch.equal(
            found.flatten(), codes.view(torch.uint8).flatten()
        )
        joined = torch.cat([found, found_scales.view(torch.uint8)], 1)
        wanted = reference.dequantize(joined, torch.empty(numel), bits)
        for packed, given in ((found, found_scales), (joined, None)):
            out = torch.empty(numel)
            small_floats.decode(packed, given, out, group, *parts)
            assert torch.equal(out, wanted)


@interpreted
def test_what_is_too_short_is_not_read() -> None:
    from deepspeed.ops.gpu import small_floats

    form = FORMATS[8]
    parts = form.exponent, form.mantissa, form.codes
    packed, scales = torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1)
    for given in ((packed[:1], scales), (packed, scales[:1]), (packed, None)):
        with pytest.raises(ValueError, match="2 groups of 16 numbers need"):
            small_floats.decode(*given, torch.empty(20), 16, *parts)


@pytest.mark.parametrize("bits", FORMATS)
@interpreted
def test_every_code_of_a_small_float(bits: int) -> None:
    from deepspeed.ops.gpu import small_floats

    form = FORMATS[bits]
    codes = torch.arange(2**bits)
    if bits == 4:
        packed = (codes[::2] | codes[1::2] << 4).to(torch.uint8)
    elif bits == 8:
        packed = codes.to(torch.uint8)
    else:
        words = sum(codes.view(-1, 24 // bits)[:, i] << (bits * i) for i in range(24 // bits))
        packed = torch.stack([words & 255, words >> 8 & 255, words >> 16], 1).to(torch.uint8)
    assert torch.equal(unpack_bits(packed.view(1, -1), bits)[0].long(), codes)
    out = torch.empty(2**bits)
    small_floats.decode(packed, torch.ones(1, 1), out, 2**bits, form.exponent, form.mantissa, form.codes)
    torch.testing.assert_close(out, form.table(torch.device("cpu")), rtol=0, atol=0, equal_nan=True)


@interpreted
def test_stochastic_rounding_is_right_in_the_mean() -> None:
    from deepspeed.ops.gpu import small_floats

    form = FORMATS[6]
    x = torch.full((2048,), 0.3)
    x[0] = form.largest
    parts = form.exponent, form.mantissa, form.codes
    packed, scales = small_floats.encode(x, 2048, *parts, form.largest, seed=11)
    out = torch.empty(2048)
    small_floats.decode(packed, scales, out, 2048, *parts)
    assert out[1:].unique().numel() == 2 and abs(out[1:].mean() - 0.3) < 0.005


class _OnDevice(CompactAdam):
    """Updates by the kernel of GPUs."""

    def _native_update(self, lib, launch, group, grad_scale):
        from deepspeed.ops.gpu import compact_adam

        steps = [int(self.state[self.params[i]]["step"]) + 1 for i in launch.indices]
        compact_adam.step(launch, steps, group, decoupled=group["adam_w_mode"], grad_scale=grad_scale)
        for i in launch.indices:
            self.state[self.params[i]]["step"] += 1


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "options"),
    [
        (torch.float32, torch.float32, {}),
        (torch.bfloat16, torch.bfloat16, {"stochastic_rounding": True}),
        (torch.float32, torch.float16, {"adam_w_mode": False}),
        (torch.bfloat16, torch.float32, {"stochastic_rounding": True, "state_bits": 32}),
    ],
    ids=["fp32", "bf16", "l2", "moments in fp32"],
)
@interpreted
def test_steps_of_compact_adam(dtype: torch.dtype, grad_dtype: torch.dtype, options: dict) -> None:
    shapes = [(1500,), (3,), (40, 33), (0,)]
    ours = [torch.randn(shape).to(dtype) for shape in shapes]
    theirs = [each.clone() for each in ours]
    common = {"lr": 1e-2, "weight_decay": 0.1, **options}
    a, b = _OnDevice(ours, **common), CompactAdam(theirs, **common)
    starts = [0, 256, 2**33, 0]
    for step in range(3):
        live = slice(0, 4 if step != 1 else 2)  # counts of steps differ
        grads = [torch.randn(shape).to(grad_dtype) for shape in shapes][live]
        grads[0][5:9] = 0
        a.params = ours[live]
        for optimizer, params in ((a, ours), (b, theirs)):
            optimizer.multi_tensor_step(
                optimizer.param_groups[0], params[live], grads, grad_scale=0.3, starts=starts[live]
            )
    for p, q in zip(ours, theirs, strict=True):
        assert _same(p, q)
        for name in a.state[p]:
            assert _same(a.state[p][name], b.state[q][name]), name


@compiling
def test_few_bits_compile() -> None:
    from deepspeed.ops.gpu import small_floats

    def all_of_them() -> None:
        x = torch.empty(4096, dtype=torch.bfloat16)
        for form in FORMATS.values():
            parts = form.exponent, form.mantissa, form.codes
            for seed in (None, 3):
                packed, scales = small_floats.encode(x, 512, *parts, form.largest, seed=seed)
            small_floats.decode(packed, scales, x, 512, *parts)

    assert built(all_of_them) == {"_encode_kernel", "_decode_kernel"}


@compiling
def test_compact_adam_compiles_without_fused_multiply_adds() -> None:
    from tests.ops.gpu.triton_kit import assembled

    def step() -> None:
        for options in ({"stochastic_rounding": True}, {"state_bits": 32}):
            params = [torch.randn(700, dtype=torch.bfloat16)]
            optimizer = _OnDevice(params, lr=1e-2, **options)
            optimizer.params = params
            optimizer.multi_tensor_step(optimizer.param_groups[0], params, [torch.randn(700)])

    found = assembled(step)
    assert {name for name, _, _ in found} == {"_compact_kernel"} and len(found) == 6
    for _, _, ptx in found:
        assert "fma.rn.f32" not in ptx and "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx
