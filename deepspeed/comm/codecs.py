"""Codecs: tensors as packets of a few bits per element, for links that are slower than the arithmetic.

A codec turns rows of numbers [..., n] into packets of bytes [..., nbytes(n)] and back. Each packet holds its own
scales, so that it can be sent, stored and decoded alone, and its size is what travels: scales and padding included.

[Note: one definition] Scales are fp32, codes are ``round(x / scale)``, ties to even, divided and not multiplied by an
inverse; bit i of a byte of signs is element i, set for ``x >= 0`` (so for -0.0 as well). All of it is IEEE arithmetic
without sums in an unspecified order, except for the mean of ``SignCodec``, which is summed in fp64. Hence every rank
decodes the same numbers from the same packet.

[Note: what is not finite] A block with a NaN or an infinity has a scale that is not finite, and decodes to numbers that
are not finite: an overflow of gradients stays visible after the sum over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
"""Elements that share a scale, unless said otherwise: 1.6 % of the bytes of int8 codes are scales."""
SIGN_BLOCK = 2048
_ALIGNMENT = 4
_SCALE = 4  # bytes


class Codec(Protocol):
    """Packets of fixed size for rows of a given length."""

    def nbytes(self, numel: int) -> int:
        """Bytes of the packet of ``numel`` elements."""
        ...

    def encode(self, values: Tensor) -> Tensor:
        """uint8 packets [..., nbytes(n)] of floating-point ``values`` [..., n]."""
        ...

    def decode(self, packets: Tensor, numel: int) -> Tensor:
        """fp32 values [..., numel] of ``packets`` [..., nbytes(numel)]."""
        ...


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Symmetric integers of 8 or 4 bits, each ``block`` of elements with its own scale: its largest magnitude becomes
    the largest code (G. Wang et al. 2023, ZeRO++, section 3.1). No element is off by more than half a scale. Two codes
    of 4 bits share a byte, the first in its lower half."""

    bits: int = 8
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits!r}: codes have 4 or 8 bits")
        if self.block < 2 or self.block % 2:
            raise ValueError(f"block={self.block!r} must be an even number of elements")

    @property
    def largest(self) -> int:
        """The largest code; the smallest is its negative."""
        return 2 ** (self.bits - 1) - 1

    def nbytes(self, numel: int) -> int:
        codes = -(-numel * self.bits // 8)
        return _round_up(_SCALE * -(-numel // self.block) + codes)

    def encode(self, values: Tensor) -> Tensor:
        numel = values.shape[-1]
        blocks = _blocks(values, self.block)
        scales = blocks.abs().amax(-1) / self.largest
        divisors = torch.where(scales > 0, scales, 1.0)
        codes = (blocks / divisors.unsqueeze(-1)).round_().clamp_(-self.largest, self.largest)
        whole = codes.to(torch.int8).flatten(-2)[..., :numel].contiguous().view(torch.uint8)
        return _packet(self.nbytes(numel), scales, whole if self.bits == 8 else _join_halves(whole))

    def decode(self, packets: Tensor, numel: int) -> Tensor:
        scales, data = _open(packets, -(-numel // self.block))
        codes = data if self.bits == 8 else _split_halves(data)
        whole = codes[..., :numel].contiguous().view(torch.int8)
        blocks = _blocks(whole, self.block)
        return blocks.mul_(scales.unsqueeze(-1)).flatten(-2)[..., :numel]


@dataclass(frozen=True, slots=True)
class SignCodec:
    """One bit per element, its sign, and for each ``block`` the mean of the magnitudes: of all scales the one with the
    smallest squared error, which is below the square of the values whatever they are, as feedback of errors needs it
    (Karimireddy et al. 2019, Error feedback fixes SignSGD)."""

    block: int = SIGN_BLOCK

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ValueError(f"block={self.block!r} must be a multiple of 8 elements")

    def nbytes(self, numel: int) -> int:
        return _round_up(_SCALE * -(-numel // self.block) + -(-numel // 8))

    def encode(self, values: Tensor) -> Tensor:
        numel = values.shape[-1]
        blocks = _blocks(values, self.block)
        counts = torch.full((blocks.shape[-2],), float(self.block), dtype=torch.float64, device=values.device)
        if numel % self.block:
            counts[-1] = numel % self.block
        means = (blocks.abs().sum(-1, dtype=torch.float64) / counts).float()
        return _packet(self.nbytes(numel), means, pack_signs(values))

    def decode(self, packets: Tensor, numel: int) -> Tensor:
        scales, data = _open(packets, -(-numel // self.block))
        signs = unpack_signs(data[..., : -(-numel // 8)], numel)
        return _blocks(signs, self.block).mul_(scales.unsqueeze(-1)).flatten(-2)[..., :numel]


def pack_signs(values: Tensor) -> Tensor:
    """uint8 [..., ceil(n / 8)]: a bit for each of ``values`` [..., n], 1 where it is not negative."""
    positive = values >= 0
    if positive.is_cpu:
        return torch.from_numpy(np.packbits(positive.numpy(), axis=-1, bitorder="little"))
    groups = _blocks(positive, 8)
    weights = (2 ** torch.arange(8, device=values.device)).float()
    return (groups * weights).sum(-1).to(torch.uint8)


def unpack_signs(packed: Tensor, numel: int) -> Tensor:
    """fp32 [..., numel]: +1 and -1 of ``pack_signs``."""
    table = _signs_of_bytes(packed.device)
    return table[packed.int()].flatten(-2)[..., :numel]


def _signs_of_bytes(device: torch.device) -> Tensor:
    """[256, 8]: the signs that each byte stands for."""
    bits = (torch.arange(256).unsqueeze(-1) >> torch.arange(8)) & 1
    return (bits * 2 - 1).float().to(device)


def _blocks(values: Tensor, block: int) -> Tensor:
    """fp32 copy [..., blocks, block], zeros at the end."""
    padding = -values.shape[-1] % block
    wide = values.to(torch.float32, copy=True)
    if padding:
        wide = F.pad(wide, (0, padding))
    return wide.unflatten(-1, (-1, block))


def _packet(nbytes: int, scales: Tensor, data: Tensor) -> Tensor:
    packet = torch.zeros(*scales.shape[:-1], nbytes, dtype=torch.uint8, device=scales.device)
    head = _SCALE * scales.shape[-1]
    packet[..., :head] = scales.contiguous().view(torch.uint8)
    packet[..., head : head + data.shape[-1]] = data
    return packet


def _open(packets: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """The scales [..., blocks] and the rest."""
    head = _SCALE * blocks
    return packets[..., :head].contiguous().view(torch.float32), packets[..., head:]


def _join_halves(codes: Tensor) -> Tensor:
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    pairs = codes.bitwise_and(15).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _split_halves(data: Tensor) -> Tensor:
    halves = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
    return ((halves ^ 8).view(torch.int8) - 8).view(torch.uint8)  # the fourth bit is the sign


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
