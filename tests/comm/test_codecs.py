"""Payloads: their size, their numbers, and what is not finite."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.ops.formats.codecs import (
    CODECS,
    BlockCodec,
    FloatCodec,
    SignCodec,
    TopCodec,
    codec_named,
    pack_signs,
    seed_of,
    unpack_signs,
)
from tests.pool import distributed


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.logspace(-4, 3, shape[-1])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("numel", [1, 7, 16, 256, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_rounded_to_their_scale(bits: int, numel: int, dtype: torch.dtype) -> None:
    codec, x = BlockCodec(bits, block=16), (values(3, numel) / 100).to(dtype)
    payloads = codec.encode(x)
    assert payloads.shape == (3, codec.nbytes(numel)) and payloads.dtype is torch.uint8
    decoded = codec.decode(payloads, numel)
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
def test_size_of_a_payload(codec: Any, numel: int, expected: int) -> None:
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


@pytest.mark.parametrize("numel", [1, 16, 77])
def test_small_floats(numel: int) -> None:
    codec, x = FloatCodec(16), values(3, numel)
    decoded = codec.decode(codec.encode(x), numel)
    for row, found in zip(x, decoded, strict=True):
        for block, out in zip(row.split(16), found.split(16), strict=True):
            scale = block.abs().max() / 448
            assert torch.equal(out, (block / scale).to(torch.float8_e4m3fn).float() * scale)
            assert ((out - block).abs() <= torch.maximum(block.abs() / 16, scale / 512) * (1 + 1e-5)).all()


@pytest.mark.parametrize("share", [0.001, 0.2, 1.0])
def test_the_largest(share: float) -> None:
    codec, x = TopCodec(share), values(3, 50)
    payloads = codec.encode(x)
    count = max(1, round(share * 50))
    assert payloads.shape == (3, codec.nbytes(50)) and codec.nbytes(50) == 8 * count
    for row, found in zip(x, codec.decode(payloads, 50), strict=True):
        limit = row.abs().sort(descending=True).values[count - 1]
        assert torch.equal(found, torch.where(row.abs() >= limit, row, 0.0))


@pytest.mark.parametrize("name", CODECS)
def test_errors_of_every_codec_are_fed_back(name: str) -> None:
    """The sum of what is decoded follows the sum of what was encoded."""
    codec, errors, total, wanted = codec_named(name, 0.2), torch.zeros(2, 300), 0.0, 0.0
    for step in range(4):
        x = values(2, 300, seed=step)
        total = total + codec.decode(codec.encode(x, errors), 300)
        wanted = wanted + x
    torch.testing.assert_close(total + errors, wanted, rtol=1e-4, atol=1e-4)


def test_bits_of_signs() -> None:
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, -2.0, 3.0, -1.0, -1.0, 5.0])
    packed = pack_signs(x)
    assert packed.tolist() == [0b00101101, 1]
    assert unpack_signs(packed, 9).tolist() == [1, -1, 1, 1, -1, 1, -1, -1, 1]


@pytest.mark.parametrize("codec", [BlockCodec(8, 16), BlockCodec(4, 16), FloatCodec(16), SignCodec(16)])
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_random(bits: int, dtype: torch.dtype) -> None:
    """Rounds to one of the two neighbours, unbiased over seeds; different for another seed, block or value, and
    otherwise reproducible."""
    numel, seeds = 64, 4000
    block = torch.linspace(-1, 1, numel).to(dtype)
    scale = 1 / BlockCodec(bits).largest
    found = torch.stack(
        [
            BlockCodec(bits, numel, seed=s).decode(BlockCodec(bits, numel, seed=s).encode(block), numel)
            for s in range(seeds)
        ]
    )
    steps = block.float() / scale
    assert ((found / scale).round() - steps).abs().max() < 1 + 1e-4
    part = steps - steps.floor()
    deviation = scale * ((part * (1 - part)).clamp(min=0) / seeds).sqrt()
    assert ((found.mean(0) - block.float()).abs() <= 5 * deviation + 2 * scale * 2**-16).all()
    codec, twice = BlockCodec(bits, numel, seed=7), block.repeat(2)
    assert torch.equal(codec.encode(block), codec.encode(block))
    first, second = codec.decode(codec.encode(twice), 2 * numel).split(numel)
    assert not torch.equal(first, second)
    other = block.clone()
    other[3] += 0.01
    assert (codec.decode(codec.encode(other), numel) != first).sum() > numel // 8
    assert not torch.equal(found[0], found[1])


def test_seeds() -> None:
    """Different for every bucket and rank."""
    assert len({seed_of(bucket, rank) for bucket in range(100) for rank in range(100)}) == 100 * 100
    assert seed_of(1, 2) == seed_of(1, 2) != seed_of(2, 1)


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
    with pytest.raises(ValueError, match="share=0"):
        TopCodec(0)
    with pytest.raises(ValueError, match="'pigeon' is unknown"):
        codec_named("pigeon")


@pytest.mark.parametrize("name", ["compressed.CompressedBackend", "nccl.NcclBackend"])
@distributed(world_size=[1, 2, 3])
def test_documented_compressed_all_reduce(world_size: int, name: str) -> None:
    """Equal to the arithmetic of the paper on all ranks' values, over several calls with what they keep."""
    module, _, cls = name.partition(".")
    backend = getattr(importlib.import_module(f"deepspeed.runtime.comm.{module}"), cls)()
    rank, part = dist.get_rank(), 16
    worker, server = torch.zeros(part * world_size), torch.zeros(part)
    workers = [worker.clone() for _ in range(world_size)]
    servers = [server.clone() for _ in range(world_size)]

    def one_bit(x: torch.Tensor) -> torch.Tensor:
        return x.norm() / x.numel() ** 0.5 * torch.where(x >= 0, 1.0, -1.0)

    for call in range(3):
        every = [values(5, 3, seed=10 * call + r) for r in range(world_size)]
        for r, x in enumerate(every):
            padded = torch.zeros(part * world_size)
            padded[:15] = x.view(-1)
            workers[r] += padded
        sent = [one_bit(x) for x in workers]
        workers = [x - s for x, s in zip(workers, sent, strict=True)]
        means = [x + s for x, s in zip((sum(sent) / world_size).split(part), servers, strict=True)]
        servers = [x - one_bit(x) for x in means]
        expected = torch.cat([one_bit(x) for x in means])[:15].view(5, 3)
        mine = every[rank].clone()
        assert backend.compressed_allreduce(mine, worker, server, rank) is mine
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(worker, workers[rank], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(server, servers[rank], rtol=1e-5, atol=1e-5)
    assert torch.equal(
        backend.unpack(backend.pack(worker, 2), 2, torch.half).view(-1),
        torch.where(worker >= 0, 1, -1).half(),
    )
    with pytest.raises(ValueError, match="worker_error has"):
        backend.compressed_allreduce(torch.zeros(99), worker, server, rank)
