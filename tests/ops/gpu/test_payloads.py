"""Payloads of codecs: the bits of the reference in PyTorch."""

from __future__ import annotations

import pytest
import torch

from deepspeed.ops.formats.codecs import BlockCodec, Codec, SignCodec
from tests.ops.gpu.triton_kit import built, compiling, interpreted

CODECS = [
    BlockCodec(8, 256),
    BlockCodec(4, 256),
    BlockCodec(8, 6),
    BlockCodec(4, 34),
    SignCodec(64),
    SignCodec(24),
    BlockCodec(8, 256, seed=5),
    BlockCodec(4, 34, seed=2**32 - 3),
]


def payloads_of(codec: Codec, values: torch.Tensor, errors: torch.Tensor | None = None) -> torch.Tensor:
    from deepspeed.ops.gpu import codecs as payloads

    made = torch.full((*values.shape[:-1], codec.nbytes(values.shape[-1])), 77, dtype=torch.uint8)
    payloads.encode(made, values, codec.codes, codec.block, errors, codec.seed)
    return made


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@interpreted
def test_the_same_payloads(codec: Codec, dtype: torch.dtype) -> None:
    from deepspeed.ops.gpu import codecs as payloads

    for shape in ((3, 515), (256,), (2, 1)):
        # In fp16, some are infinite.
        values = (torch.randn(shape) * 10.0 ** torch.randint(-6, 6, shape)).to(dtype)
        values.view(-1)[:: 7 if values.numel() > 9 else 1] *= -0.0
        found = payloads_of(codec, values)
        assert torch.equal(found, codec.pack(values))
        decoded = torch.empty(shape)
        payloads.decode(found, decoded, codec.codes, codec.block)
        torch.testing.assert_close(decoded, codec.unpack(found, shape[-1]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", CODECS[:2] + CODECS[4:5] + CODECS[6:7], ids=str)
@interpreted
def test_errors_are_fed_back_and_rows_are_summed(codec: Codec) -> None:
    from deepspeed.ops.gpu import codecs as payloads

    values, errors = torch.randn(3, 300), torch.randn(3, 300) / 9
    wanted = values + errors
    found = payloads_of(codec, values, errors)
    assert torch.equal(found, codec.pack(wanted))
    assert torch.equal(errors, wanted - codec.unpack(found, 300))
    total = torch.empty(300)
    payloads.decode(found, total, codec.codes, codec.block, total=True)
    exact = torch.zeros(300)
    for row in codec.unpack(found, 300):
        exact += row
    assert torch.equal(total, exact)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@interpreted
def test_what_is_not_finite_stays_visible(wrong: float) -> None:
    from deepspeed.ops.gpu import codecs as payloads

    values = torch.ones(512)
    values[3] = wrong
    for codec in CODECS[:2]:
        decoded = torch.empty(512)
        payloads.decode(payloads_of(codec, values), decoded, codec.codes, codec.block)
        assert not decoded[:256].isfinite().any() and decoded[256:].eq(1).all()


@compiling
def test_payloads_compile() -> None:
    from deepspeed.ops.gpu import codecs as payloads

    def all_of_them() -> None:
        for codec in (BlockCodec(8), BlockCodec(4), BlockCodec(8, seed=1), SignCodec()):
            values, errors = torch.empty(2, 4096, dtype=torch.bfloat16), torch.empty(2, 4096)
            made = torch.empty(2, codec.nbytes(4096), dtype=torch.uint8)
            payloads.encode(made, values, codec.codes, codec.block, errors, codec.seed)
            payloads.decode(made, errors[0], codec.codes, codec.block, total=True)

    assert built(all_of_them) == {"_encode_integers_kernel", "_encode_signs_kernel", "_decode_kernel"}
