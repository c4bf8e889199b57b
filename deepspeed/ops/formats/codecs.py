"""Codecs: tensors as quantized payloads of a few bits per element, for slow links.

A codec encodes rows of numbers [..., n] into payloads of bytes [..., nbytes(n)] and decodes them. Each payload holds
its own scales, so it can be sent, stored and decoded alone; its size is what is sent, scales and padding included.

[Note: one definition] Scales are fp32, codes are ``round(x / scale)``, ties to even, by division, not by multiplication
with an inverse; bit i of a byte of signs is element i, set for ``x >= 0`` (so for -0.0 as well). All of it is IEEE
arithmetic without sums in an unspecified order, except for the mean of ``SignCodec``, which is summed in fp64. Hence
every rank decodes the same numbers from the same payload. On the host the native library does all of it in one pass
over memory, on GPUs a Triton kernel (``ops/formats/host_codecs.py``), bit-identically.

[Note: stochastic rounding] ``BlockCodec`` with a seed rounds stochastically: each quotient up or down, unbiased. The
direction is a hash of the element's index in its block, the bits of all numbers of the block, the block's number, and
the seed. So there is no state: different numbers, hence every step, are rounded differently; ranks and buckets have
different seeds; and the same numbers are rounded the same way on every device, and in a resumed run.

[Note: non-finite values] A block with a NaN or an infinity has a non-finite scale, and decodes to non-finite numbers: a
gradient overflow stays visible after the sum over ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed.ops.formats import host_codecs as native
from deepspeed.ops.formats.integers import Rounding, divisors, nearest, symmetric_levels
from deepspeed.ops.formats.packing import pack_bits, unpack_bits

BLOCK = 256
"""Default number of elements per scale: scales are 1.6 % of the bytes of int8 codes."""
SIGN_BLOCK = 2048
_FLOAT_MAX = 448.0
_ALIGNMENT = 4
_SCALE = 4  # bytes


class Codec(ABC):
    """Encodes rows of a given length into payloads of fixed size."""

    __slots__ = ()

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the size in bytes of the payload of ``numel`` elements."""

    @abstractmethod
    def pack(self, values: Tensor) -> Tensor:
        """Return uint8 payloads [..., nbytes(n)] of floating-point ``values`` [..., n]."""

    @abstractmethod
    def unpack(self, payloads: Tensor, numel: int) -> Tensor:
        """Return fp32 values [..., numel] of ``payloads`` [..., nbytes(numel)]."""

    def seeded(self, seed: int) -> Codec | None:
        """Return this codec with stochastic rounding by ``seed`` (32 bits); None: the format has none."""
        return None

    def encode(self, values: Tensor, errors: Tensor | None = None) -> Tensor:
        """Return uint8 payloads [..., nbytes(n)] of floating-point ``values`` [..., n].

        ``errors``: fp32 of the same shape, the error feedback: encoding errors of earlier payloads. They are added
        first, and replaced by the new errors.
        """
        if errors is None:
            return self.pack(values)
        wanted = values.float() + errors
        payloads = self.pack(wanted)
        torch.sub(wanted, self.unpack(payloads, values.shape[-1]), out=errors)
        return payloads

    def decode(self, payloads: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Return fp32 values [..., numel] of ``payloads`` [..., nbytes(numel)], in ``out`` if given."""
        values = self.unpack(payloads, numel)
        return values if out is None else out.copy_(values)

    def total(self, payloads: Tensor, numel: int) -> Tensor:
        """Return fp32 [numel]: the sum of the decoded ``payloads`` [rows, nbytes(numel)], in row order."""
        result = torch.zeros(numel, dtype=torch.float32, device=payloads.device)
        for payload in payloads:
            result.add_(self.decode(payload, numel))
        return result


class _NativeCodec(Codec):
    """A codec with kernels. ``codes``: the element format (``enum ds_codes`` of the native library: mostly the number
    of bits); there is one scale per ``block``. ``on_gpu``: whether there are kernels for GPUs."""

    __slots__ = ()
    on_gpu: ClassVar[bool] = True
    codes: int
    block: int
    seed: int | None

    def _encode(self, payloads: Tensor, values: Tensor, errors: Tensor | None) -> bool:
        """Encode by a kernel. Returns False, without effect, if there is none for these tensors; so does `_decode`."""
        return native.encode(payloads, values, self.codes, self.block, errors, self.seed)

    def _decode(self, payloads: Tensor, values: Tensor, *, total: bool = False) -> bool:
        return native.decode(payloads, values, self.codes, self.block, total=total)

    def _may_have_kernel(self, tensor: Tensor) -> bool:
        return tensor.is_cpu or (self.on_gpu and tensor.is_cuda)

    def encode(self, values: Tensor, errors: Tensor | None = None) -> Tensor:
        if self._may_have_kernel(values):
            shape = (*values.shape[:-1], self.nbytes(values.shape[-1]))
            payloads = torch.empty(shape, dtype=torch.uint8, device=values.device)
            if self._encode(payloads, values.contiguous(), errors):
                return payloads
        return super().encode(values, errors)

    def decode(self, payloads: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        if self._may_have_kernel(payloads):
            values = _floats(payloads, *payloads.shape[:-1], numel) if out is None else out
            if self._decode(payloads.contiguous(), values):
                return values
        return super().decode(payloads, numel, out)

    def total(self, payloads: Tensor, numel: int) -> Tensor:
        if self._may_have_kernel(payloads):
            values = _floats(payloads, numel)
            if self._decode(payloads.contiguous(), values, total=True):
                return values
        return super().total(payloads, numel)


@dataclass(frozen=True, slots=True)
class BlockCodec(_NativeCodec):
    """Symmetric 8-bit or 4-bit integers with one scale per ``block`` of elements, which maps its largest magnitude to
    the largest code (G. Wang et al. 2023, ZeRO++, section 3.1). The error is at most half a scale; with a ``seed`` (32
    bits, stochastic rounding) it is below one scale, and zero on average. Two 4-bit codes share a byte, the first in
    its lower half."""

    bits: int = 8
    block: int = BLOCK
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits!r}: must be 4 or 8")
        if self.block < 2 or self.block % 2:
            raise ValueError(f"block={self.block!r} must be an even number of elements")

    @property
    def codes(self) -> int:  # type: ignore[override]
        return self.bits

    def seeded(self, seed: int) -> BlockCodec:
        return replace(self, seed=seed)

    @property
    def largest(self) -> int:
        """The largest code; the smallest is its negative."""
        return 2 ** (self.bits - 1) - 1

    def nbytes(self, numel: int) -> int:
        codes = -(-numel * self.bits // 8)
        return _round_up(_SCALE * -(-numel // self.block) + codes)

    def pack(self, values: Tensor) -> Tensor:
        numel = values.shape[-1]
        blocks = _blocks(values, self.block)
        rounding = nearest if self.seed is None else self._stochastic(blocks, self.seed)
        codes, scales = symmetric_levels(blocks, self.bits, rounding=rounding, narrow=True)
        whole = codes.to(torch.int8).flatten(-2)[..., :numel].contiguous().view(torch.uint8)
        packed = whole if self.bits == 8 else pack_bits(whole & 15, 4)
        return _payload(self.nbytes(numel), scales.squeeze(-1), packed)

    @staticmethod
    def _stochastic(blocks: Tensor, seed: int) -> Rounding:
        return lambda quotients: quotients.add_(_random_offsets(blocks, seed)).round_()

    def unpack(self, payloads: Tensor, numel: int) -> Tensor:
        scales, data = _split_payload(payloads, -(-numel // self.block))
        codes = unpack_bits(data, self.bits, numel).contiguous().view(torch.int8)
        whole = codes if self.bits == 8 else (codes ^ 8) - 8  # sign-extend the fourth bit
        blocks = _blocks(whole, self.block)
        return blocks.mul_(scales.unsqueeze(-1)).flatten(-2)[..., :numel]


@dataclass(frozen=True, slots=True)
class SignCodec(_NativeCodec):
    """One sign bit per element, and per ``block`` the mean magnitude as scale: the scale with the least squared error,
    which is below the squared norm of any values, as error feedback requires (Karimireddy et al. 2019, Error feedback
    fixes SignSGD)."""

    block: int = SIGN_BLOCK
    codes: ClassVar[int] = 1
    seed: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ValueError(f"block={self.block!r} must be a multiple of 8 elements")

    def nbytes(self, numel: int) -> int:
        return _round_up(_SCALE * -(-numel // self.block) + -(-numel // 8))

    def pack(self, values: Tensor) -> Tensor:
        numel = values.shape[-1]
        blocks = _blocks(values, self.block)
        counts = torch.full((blocks.shape[-2],), float(self.block), dtype=torch.float64, device=values.device)
        if numel % self.block:
            counts[-1] = numel % self.block
        means = (blocks.abs().sum(-1, dtype=torch.float64) / counts).float()
        return _payload(self.nbytes(numel), means, pack_signs(values))

    def unpack(self, payloads: Tensor, numel: int) -> Tensor:
        scales, data = _split_payload(payloads, -(-numel // self.block))
        signs = unpack_signs(data[..., : -(-numel // 8)], numel)
        return _blocks(signs, self.block).mul_(scales.unsqueeze(-1)).flatten(-2)[..., :numel]


@dataclass(frozen=True, slots=True)
class FloatCodec(_NativeCodec):
    """8-bit floating-point numbers (e4m3) with one scale per ``block`` of elements, which maps its largest magnitude to
    448, the largest such number. Small elements of a block keep three bits where integers would lose them."""

    block: int = BLOCK
    codes: ClassVar[int] = 256 + 8
    seed: ClassVar[None] = None

    def nbytes(self, numel: int) -> int:
        return _round_up(_SCALE * -(-numel // self.block) + numel)

    def pack(self, values: Tensor) -> Tensor:
        numel = values.shape[-1]
        blocks = _blocks(values, self.block)
        scales = blocks.abs().amax(-1) / _FLOAT_MAX
        codes = (
            (blocks / divisors(scales).unsqueeze(-1)).clamp_(-_FLOAT_MAX, _FLOAT_MAX).to(torch.float8_e4m3fn)
        )
        return _payload(
            self.nbytes(numel), scales, codes.view(torch.uint8).flatten(-2)[..., :numel].contiguous()
        )

    def unpack(self, payloads: Tensor, numel: int) -> Tensor:
        scales, data = _split_payload(payloads, -(-numel // self.block))
        codes = data[..., :numel].contiguous().view(torch.float8_e4m3fn)
        return _blocks(codes, self.block).mul_(scales.unsqueeze(-1)).flatten(-2)[..., :numel]


class RootCodec(Codec):
    """Non-negative numbers as 8-bit floating-point square roots with a scale per block: relative error below 13 %. A
    root that would become 0 (less than 1/229,376 of the largest in its block) is raised to that minimum, so dividing by
    it stays harmless."""

    __slots__ = ()
    roots = FloatCodec()
    least = 2.0**-9 / _FLOAT_MAX  # smallest e4m3 number, relative to the largest

    def nbytes(self, numel: int) -> int:
        return self.roots.nbytes(numel)

    def pack(self, values: Tensor) -> Tensor:
        roots = values.float().sqrt()
        blocks = _blocks(roots, self.roots.block)
        least = blocks.amax(-1, keepdim=True).mul_(self.least)
        return self.roots.encode(torch.maximum(blocks, least).flatten(-2)[..., : roots.shape[-1]])

    def unpack(self, payloads: Tensor, numel: int) -> Tensor:
        return self.roots.decode(payloads, numel).square_()


@dataclass(frozen=True, slots=True)
class TopCodec(_NativeCodec):
    """The ``share`` of elements with the largest magnitudes, unquantized, with their indices in ascending order (A. F.
    Aji, K. Heafield 2017, Sparse communication for distributed gradient descent). The rest is zero, left to error
    feedback. Ties go to the lowest index; a NaN counts as larger than all numbers."""

    on_gpu: ClassVar[bool] = False
    share: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share={self.share!r} must be above 0 and at most 1")

    def _count(self, numel: int) -> int:
        return min(numel, math.ceil(numel * self.share))

    def nbytes(self, numel: int) -> int:
        return 8 * self._count(numel)

    def pack(self, values: Tensor) -> Tensor:
        wide = values.float().contiguous()
        numel = wide.shape[-1]
        magnitudes = wide.view(torch.int32).bitwise_and(0x7FFFFFFF).long()  # compared as bits
        ranks = magnitudes * 2**31 - torch.arange(numel, device=wide.device)
        places = ranks.topk(self._count(numel), dim=-1, sorted=False).indices.sort(dim=-1).values
        chosen = wide.gather(-1, places).contiguous().view(torch.uint8)
        return torch.cat([chosen, places.int().contiguous().view(torch.uint8)], dim=-1)

    def unpack(self, payloads: Tensor, numel: int) -> Tensor:
        chosen, places = payloads.contiguous().chunk(2, dim=-1)
        result = torch.zeros(*payloads.shape[:-1], numel, dtype=torch.float32, device=payloads.device)
        wide = chosen.contiguous().view(torch.float32)
        return result.scatter_(-1, places.contiguous().view(torch.int32).long(), wide)

    def _encode(self, payloads: Tensor, values: Tensor, errors: Tensor | None) -> bool:
        return native.encode_largest(payloads, values, self._count(values.shape[-1]), errors)

    def _decode(self, payloads: Tensor, values: Tensor, *, total: bool = False) -> bool:
        return native.decode_largest(payloads, values, self._count(values.shape[-1]), total=total)


CODECS: dict[str, Callable[[float], Codec]] = {
    "int8": lambda _: BlockCodec(8),
    "int4": lambda _: BlockCodec(4),
    "fp8": lambda _: FloatCodec(),
    "signs": lambda _: SignCodec(),
    "top_k": TopCodec,
}
"""``gradient_compression.codec`` -> its constructor from ``gradient_compression.share``. The schema, the rules and the
plan read this table."""


def codec_named(name: str, share: float = 0.01) -> Codec:
    """Return one of ``CODECS``; ``share``: fraction of elements, for "top_k". ValueError: unknown."""
    if name not in CODECS:
        raise ValueError(f"codec {name!r} is unknown: use one of {', '.join(CODECS)}")
    return CODECS[name](share)


_WORD = 0xFFFFFFFF


def seed_of(*numbers: int) -> int:
    """Hash ``numbers``, in order, to 32 bits."""
    seed = 0
    for number in numbers:
        seed = _hash32(seed + number)
    return seed


def _random_offsets(blocks: Tensor, seed: int) -> Tensor:
    """Return fp32 in (-1/2, 1/2) per element of ``blocks`` [..., blocks, block], fp32; see [Note: stochastic
    rounding]."""
    block = blocks.shape[-1]
    number = torch.arange(blocks.numel() // block, device=blocks.device)
    keys = _hash32(number + _hash32(number.new_full((), seed & _WORD) + (number >> 32)))
    keys = _hash32(blocks.view(torch.int32).long().sum(-1) + keys.view(blocks.shape[:-1]))
    random = _hash32(keys.unsqueeze(-1) + torch.arange(block, device=blocks.device))
    return ((random >> 15) | 1).float().mul_(2.0**-17).sub_(0.5)


def _hash32(x: Any) -> Any:
    """Hash the lowest 32 bits of an integer or of int64 numbers, as ``mix`` in ``csrc/include/mixing.h`` does."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def pack_signs(values: Tensor) -> Tensor:
    """Return uint8 [..., ceil(n / 8)]: one bit per element of ``values`` [..., n], 1 if it is not negative."""
    positive = values >= 0
    if positive.is_cpu:
        return torch.from_numpy(np.packbits(positive.numpy(), axis=-1, bitorder="little"))
    return pack_bits(positive.to(torch.uint8), 1)


def unpack_signs(packed: Tensor, numel: int) -> Tensor:
    """Return fp32 [..., numel]: +1 and -1 from ``pack_signs``."""
    return unpack_bits(packed, 1, numel).float().mul_(2).sub_(1)


def _floats(beside: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=beside.device)


def _blocks(values: Tensor, block: int) -> Tensor:
    """Copy to fp32 [..., blocks, block], zero-padded."""
    padding = -values.shape[-1] % block
    wide = values.to(torch.float32, copy=True)
    if padding:
        wide = F.pad(wide, (0, padding))
    return wide.unflatten(-1, (-1, block))


def _payload(nbytes: int, scales: Tensor, data: Tensor) -> Tensor:
    payload = torch.zeros(*scales.shape[:-1], nbytes, dtype=torch.uint8, device=scales.device)
    head = _SCALE * scales.shape[-1]
    payload[..., :head] = scales.contiguous().view(torch.uint8)
    payload[..., head : head + data.shape[-1]] = data
    return payload


def _split_payload(payloads: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Split payloads into scales [..., blocks] and data."""
    head = _SCALE * blocks
    return payloads[..., :head].contiguous().view(torch.float32), payloads[..., head:]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
