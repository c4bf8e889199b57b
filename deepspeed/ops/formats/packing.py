"""Codes of 1 to 12 bits packed contiguously into bytes: the first in the lowest bits of the first byte."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def pack_bits(codes: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Pack the ``n`` integers below ``2**bits`` along ``dim`` of ``codes`` into uint8, ``ceil(n * bits / 8)`` bytes."""
    if bits == 8:
        return codes.to(torch.uint8)
    dim, count = dim % codes.dim(), codes.shape[dim]
    word = math.lcm(bits, 8)
    if word > 8:
        codes = codes.to(_word_dtype(word))
    each = _parts(codes, dim, word // bits)
    words = each[0].clone()
    for number, part in enumerate(each[1:], 1):
        words |= part << (bits * number)
    if word == 8:
        return words.to(torch.uint8)
    return _interleaved(
        [(words >> shift) & 255 for shift in range(0, word, 8)], dim, -(-count * bits // 8)
    ).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int, count: int | None = None, dim: int = -1) -> Tensor:
    """Invert `pack_bits`: return ``count`` codes along ``dim`` (by default as many as fit), uint8, or int32 for more
    than 8 bits."""
    dim = dim % packed.dim()
    if count is None:
        count = packed.shape[dim] * 8 // bits
    if bits == 8:
        return packed.narrow(dim, 0, count)
    word = math.lcm(bits, 8)
    words = packed
    if word > 8:
        words, *others = _parts(packed.to(_word_dtype(word)), dim, word // 8)
        for number, part in enumerate(others, 1):
            words = words | part << (8 * number)
    mask = (1 << bits) - 1
    codes = _interleaved([(words >> shift) & mask for shift in range(0, word, bits)], dim, count)
    return codes.to(torch.uint8 if bits < 8 else torch.int32)


def _word_dtype(bits: int) -> torch.dtype:
    return torch.int32 if bits < 32 else torch.int64


def _parts(values: Tensor, dim: int, each: int) -> tuple[Tensor, ...]:
    """Split into strided slices with step ``each`` along ``dim``, zero-padded at the end."""
    if missing := -values.shape[dim] % each:
        values = functional.pad(values, [0, 0] * (values.dim() - 1 - dim) + [0, missing])
    return values.unflatten(dim, (-1, each)).unbind(dim + 1)


def _interleaved(parts: list[Tensor], dim: int, count: int) -> Tensor:
    """Invert `_parts`; keep the first ``count`` along ``dim``."""
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1).narrow(dim, 0, count)
