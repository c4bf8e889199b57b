"""Codes of numbers next to a tie of two codes, where the last bit of a quotient decides: the same as in PyTorch
from every instruction set, whether it divides or multiplies by an inverse (``csrc/include/divisor.h``)."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from deepspeed.ops import native
from deepspeed.ops.formats.codecs import BlockCodec, FloatCodec
from deepspeed.ops.fp_quantizer import FP_Quantize
from deepspeed.transforms.lora import QuantizationConfig

BLOCKS, BLOCK = 2000, 256


def next_to_ties(scales: Tensor, most: float, digits: int) -> Tensor:
    """[blocks, BLOCK]: the first of a block makes its scale, the others are up to 3 units in the last place from a
    product of the scale with a number of few binary digits."""
    generator = torch.Generator().manual_seed(0)

    def draw(high: int) -> Tensor:
        return torch.randint(high, (len(scales), BLOCK), generator=generator)

    ties = (1 + draw(2**digits) / 2**digits) * 2.0 ** (math.floor(math.log2(most)) - draw(10))
    x = ties.float() * scales.unsqueeze(1)
    x = (x.view(torch.int32) + draw(7).int() - 3).clamp_(min=0).view(torch.float32)
    x[:, 0] = scales * most
    return torch.where(draw(2) == 0, x, -x).clamp(-x[:, :1].abs(), x[:, :1].abs())


def some_scales(low: float, high: float) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    mantissas = 1 + torch.rand(BLOCKS, generator=generator)
    return mantissas * 2.0 ** torch.empty(BLOCKS).uniform_(low, high, generator=generator).floor()


@pytest.mark.parametrize("codec", [BlockCodec(8), BlockCodec(4), FloatCodec()], ids=str)
@pytest.mark.parametrize(("low", "high"), [(-20, 20), (-146, -90), (90, 118)])
def test_payloads(codec: Any, low: float, high: float, isa: str) -> None:
    most, digits = {8: (127.0, 7), 4: (7.0, 4)}.get(codec.codes, (448.0, 4))
    x = next_to_ties(some_scales(low, high), most, digits).flatten()
    assert torch.equal(codec.encode(x), codec.pack(x))


@pytest.mark.parametrize("bits", [4, 6, 8, 12])
@pytest.mark.parametrize(("low", "high"), [(-40, 40), (-126, -90), (55, 62)])
def test_small_floats(bits: int, low: float, high: float, isa: str) -> None:
    most = {4: 6.0, 6: 28.0, 8: 448.0, 12: 2.0**64 * 1.9375}[bits]
    x = next_to_ties(some_scales(low, high), most, 5)
    quantizer = FP_Quantize(QuantizationConfig(group_size=BLOCK))
    found = quantizer.quantize(x, q_bits=bits)
    with mock.patch.object(native, "library", lambda: None):
        expected = quantizer.quantize(x, q_bits=bits)
    assert isinstance(found, Tensor) and isinstance(expected, Tensor) and torch.equal(found, expected)
