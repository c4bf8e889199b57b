"""Packets: their size, their numbers, and what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.comm.codecs import BlockCodec, SignCodec, pack_signs, unpack_signs


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.logspace(-4, 3, shape[-1])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("numel", [1, 7, 16, 256, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_rounded_to_their_scale(bits: int, numel: int, dtype: torch.dtype) -> None:
    codec, x = BlockCodec(bits, block=16), (values(3, numel) / 100).to(dtype)
    packets = codec.encode(x)
    assert packets.shape == (3, codec.nbytes(numel)) and packets.dtype is torch.uint8
    decoded = codec.decode(packets, numel)
    assert decoded.dtype is torch.float32
    for row, found in zip(x.float(), decoded, strict=True):
        for start in range(0, numel, 16):
            block, out = row[start : start + 16], found[start : start + 16]
            scale = block.abs().max() / (2 ** (bits - 1) - 1)
            expected = torch.round(block / scale).clamp(-codec.largest, codec.largest) * scale
            assert torch.equal(out, expected)
            assert (out - block).abs().max() <= scale / 2 * (1 + 1e-4)


@pytest.mark.parametrize(
    ("codec", "numel", "expected"),
    [
        (BlockCodec(8), 2560, 2560 + 10 * 4),
        (BlockCodec(4), 2560, 1280 + 10 * 4),
        (BlockCodec(4), 257, 140),
        (SignCodec(), 4096, 512 + 2 * 4),
        (SignCodec(8), 9, 4 * 2 + 2 + 2),
    ],
)
def test_size_of_a_packet(codec: Any, numel: int, expected: int) -> None:
    assert codec.nbytes(numel) == expected == codec.encode(values(numel)).numel()


@pytest.mark.parametrize("numel", [1, 8, 13, 64, 77])
def test_signs_and_their_mean_magnitude(numel: int) -> None:
    codec, x = SignCodec(32), values(2, numel)
    decoded = codec.decode(codec.encode(x), numel)
    for row, found in zip(x, decoded, strict=True):
        for start in range(0, numel, 32):
            block = row[start : start + 32]
            mean = block.abs().double().mean().float()
            assert torch.equal(found[start : start + 32], torch.where(block >= 0, mean, -mean))
            assert (found[start : start + 32] - block).norm() <= block.norm()


def test_bits_of_signs() -> None:
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, -2.0, 3.0, -1.0, -1.0, 5.0])
    packed = pack_signs(x)
    assert packed.tolist() == [0b00101101, 1]
    assert unpack_signs(packed, 9).tolist() == [1, -1, 1, 1, -1, 1, -1, -1, 1]


@pytest.mark.parametrize("codec", [BlockCodec(8, 16), BlockCodec(4, 16), SignCodec(16)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(codec: Any, bad: float) -> None:
    x = values(48)
    x[20] = bad
    found = codec.decode(codec.encode(x), 48)
    assert not found[16:32].isfinite().any() and found[:16].isfinite().all() and found[32:].isfinite().all()


@pytest.mark.parametrize("codec", [BlockCodec(8, 16), BlockCodec(4, 16), SignCodec(16)])
def test_zeros_stay_zero(codec: Any) -> None:
    assert not codec.decode(codec.encode(torch.zeros(40)), 40).any()


@pytest.mark.parametrize("bits", [4, 8])
def test_what_was_decoded_is_encoded_to_the_same(bits: int) -> None:
    codec = BlockCodec(bits, 32)
    once = codec.decode(codec.encode(values(320)), 320)
    torch.testing.assert_close(codec.decode(codec.encode(once), 320), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{"bits": 3}, {"block": 7}, {"block": 0}])
def test_impossible_codecs(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        BlockCodec(**options)
    with pytest.raises(ValueError, match="block=12"):
        SignCodec(12)
