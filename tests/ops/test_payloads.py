"""Payloads made by the native library: the same bits as those of PyTorch, with every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.ops.formats import host_codecs as native
from deepspeed.ops.formats.codecs import BlockCodec, Codec, FloatCodec, SignCodec, TopCodec
from tests.ops.cases import DTYPES, same_bits

CODECS = [SignCodec(), SignCodec(24), BlockCodec(8), BlockCodec(4), BlockCodec(4, 6), BlockCodec(8, 2050)]
CODECS += [BlockCodec(8, seed=1), BlockCodec(4, 6, seed=2), BlockCodec(4, 2050, seed=2**32 - 1)]
CODECS += [FloatCodec(), FloatCodec(6), TopCodec(0.01), TopCodec(0.4), TopCodec(1.0)]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.logspace(-2, 2, shape[-1])


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("numel", [1, 15, 256, 4097])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_payloads_and_values(codec: Any, numel: int, dtype: torch.dtype, isa: str) -> None:
    x = values(3, numel).to(dtype)
    x[0, numel // 2] = -0.0
    payloads = codec.encode(x)
    assert torch.equal(payloads, codec.pack(x))
    assert same_bits(codec.decode(payloads, numel), codec.unpack(payloads, numel))
    out = torch.empty(3, numel, dtype=dtype)
    assert same_bits(codec.decode(payloads, numel, out=out), codec.unpack(payloads, numel).to(dtype))
    assert same_bits(codec.total(payloads, numel), Codec.total(codec, payloads, numel))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_same_errors(codec: Any, dtype: torch.dtype, threads: int, isa: str) -> None:
    torch.set_num_threads(threads)
    x, errors = values(2, 50001).to(dtype), values(2, 50001, seed=1)
    expected = errors.clone()
    payloads = Codec.encode(codec, x, expected)
    assert torch.equal(codec.encode(x, errors), payloads)
    assert same_bits(errors, expected)


@pytest.mark.parametrize(
    "codec", [SignCodec(16), BlockCodec(8, 16), BlockCodec(4, 16), FloatCodec(16)], ids=str
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38, 1e-45, 1e-40])
def test_extremes(codec: Any, bad: float, isa: str) -> None:
    x = values(48)
    x[16:32] *= 0.0 if abs(bad) < 1 else 1.0
    x[20] = bad
    payloads, finite = codec.encode(x), abs(bad) < float("inf")
    found = codec.decode(payloads, 48)
    assert found[:16].isfinite().all() and found[32:].isfinite().all()
    assert found[16:32].isfinite().all() == finite and found[16:32].isfinite().any() == finite
    if finite:
        assert torch.equal(payloads, codec.pack(x))


def test_every_small_float(isa: str) -> None:
    """All codes are decoded, and all numbers between rounded, as PyTorch does."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = torch.cat([every[every.isfinite()], torch.linspace(-448, 448, 4001), torch.logspace(-6, 2.6, 4001)])
    codec, x = FloatCodec(8192 * 2), torch.cat([x, -x])
    assert torch.equal(codec.encode(x), codec.pack(x))
    payloads = torch.zeros(256 + 4, dtype=torch.uint8)
    payloads[:4], payloads[4:] = torch.ones(1).view(torch.uint8), torch.arange(256, dtype=torch.uint8)
    assert same_bits(codec.decode(payloads, 256).nan_to_num(nan=1e9), every.nan_to_num(nan=1e9))


@pytest.mark.parametrize("share", [0.01, 0.3])
@pytest.mark.parametrize("kind", ["equal", "zeros", "ends", "steps", "nan"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_largest_of_any_numbers(
    kind: str, share: float, threads: int, dtype: torch.dtype, isa: str
) -> None:
    """Where a sample says little, or the wrong thing, about the largest magnitudes, and what is not finite."""
    torch.set_num_threads(threads)
    numel, codec = 150_001, TopCodec(share)
    x = {
        "equal": torch.ones(numel),
        "zeros": torch.zeros(numel).index_fill_(0, torch.tensor([5, 149_999]), -2.0),
        "ends": torch.cat([torch.zeros(numel - 1000), torch.arange(1000.0)]),
        "steps": torch.arange(numel).div(37_000, rounding_mode="floor").float() - 2,
        "nan": values(numel).index_fill_(0, torch.tensor([7, 70_000]), float("nan")),
    }[kind]
    x[17] = -float("inf") if kind == "nan" else x[17]
    x = x.to(dtype)
    payloads = codec.encode(x)
    assert torch.equal(payloads, codec.pack(x))
    for owed in (values(numel, seed=1), torch.zeros(numel)):
        errors, expected = owed.clone(), owed.clone()
        payloads = Codec.encode(codec, x, expected)
        assert torch.equal(codec.encode(x, errors), payloads)
        assert torch.equal(errors.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


def test_places_beyond_a_row() -> None:
    """A damaged payload writes nowhere else."""
    codec = TopCodec(0.5)
    payloads = codec.encode(torch.tensor([1.0, -3.0, 2.0, 0.5]))
    payloads[8:12] = torch.tensor([-7], dtype=torch.int32).view(torch.uint8)
    assert codec.decode(payloads, 4).tolist() == [0.0, 0.0, 2.0, 0.0]


def test_what_the_library_leaves_to_torch() -> None:
    """Other types and layouts give the same, by another way."""
    codec, x = BlockCodec(8), values(4, 512)
    wide = x.double()
    assert not native.encode(torch.empty(4, codec.nbytes(512), dtype=torch.uint8), wide, 8, 256)
    assert torch.equal(codec.encode(wide), codec.encode(x))
    spread = x.t().contiguous().t()
    assert torch.equal(codec.encode(spread), codec.encode(x))
    out = torch.empty(512, 4).t()
    assert torch.equal(codec.decode(codec.encode(x), 512, out=out), codec.decode(codec.encode(x), 512))


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("codec", [SignCodec(), FloatCodec(), TopCodec(0.1)], ids=str)
def test_without_the_library(codec: Any) -> None:
    x, errors = values(2, 3000), torch.zeros(2, 3000)
    payloads = codec.encode(x, errors)
    assert torch.equal(errors, x - codec.decode(payloads, 3000))
