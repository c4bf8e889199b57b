"""Blockwise 8-bit codes: blocks of 256 elements, each with its largest magnitude as scale (4 bytes).

T. Dettmers et al.: 8-bit Optimizers via Block-wise Quantization (ICLR 2022). Let ``x`` in [0, 1] be a number's ratio to
the largest magnitude in its block. Its code is the position of ``span * x + c``, with ``c = 1/256``, among the
floating-point numbers from ``c`` to ``c + span`` with a few mantissa bits:

    ``UNSIGNED``  256 codes, 5 mantissa bits: steps of 1.6 to 3.1 % of a large number, 1/8000 of the largest near 0
    ``SIGNED``    a sign and 128 codes, 4 mantissa bits: steps of 3.1 to 6.2 %, 1/4000 near 0

The first code is exactly 0, the last exactly the largest magnitude. Decoded values therefore encode to the same codes
and scales: a checkpoint in fp32 restores both bit for bit.

Blocks start at the start of a parameter, so parameters must be cut at multiples of ``BLOCK``.

This is the PyTorch reference, for every device; the host kernel (``csrc/adam/compact_adam.cpp``) is bit-identical.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
"""Elements per scale."""

OFFSET, BASE = 2.0**-15, 112 << 23
"""``c`` and its bits. All is scaled by 2**-7, so that the bits of ``c`` are zero where a code's bits go: encoding and
decoding are shifts."""
ABOVE = 1 + 2.0**-22
"""Exceeds rounding errors, so that the largest magnitude always gets the last code."""
TINY = 1e-30
"""Blocks whose largest magnitude is below this are zero."""
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Code:
    """One of the two formats of codes."""

    top: int
    """The largest code of a magnitude."""
    shift: int
    """Position of a code's lowest bit in a float's bits."""
    span: float
    signed: bool

    def dither_bits(self, dither: Tensor) -> Tensor:
        """Return the top bits of 32-bit ``dither``, aligned below a code's lowest bit."""
        return dither >> (32 - self.shift)


UNSIGNED = Code(255, 18, 251 * OFFSET, False)
SIGNED = Code(127, 19, 247 * OFFSET, True)


def blocks(numel: int) -> int:
    """Return the number of scales for ``numel`` elements."""
    return -(-numel // BLOCK)


def decode(code: Code, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 values of ``codes`` (uint8, any shape; ``scales`` [blocks])."""
    return (_shares(code, codes) * _fp32(1 / code.span) * _per_element(scales, codes.numel())).view(
        codes.shape
    )


def decode_scaled(code: Code, codes: Tensor, scales: Tensor, by: float) -> Tensor:
    """Decode and multiply by ``by``, for updates, with one rounding less per element, so not exactly the product."""
    factors = scales * _fp32(by / code.span)
    return (_shares(code, codes) * _per_element(factors, codes.numel())).view(codes.shape)


def _shares(code: Code, codes: Tensor) -> Tensor:
    """Return ratios to the largest magnitude, times the code's span: fp32 [codes.numel()]."""
    flat = codes.reshape(-1).to(torch.int32)
    shares = (BASE | ((flat & code.top) << code.shift)).view(torch.float32) - OFFSET
    if code.signed:
        shares = (shares.view(torch.int32) | ((flat & 128) << 24)).view(torch.float32)
    return shares


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def encode(code: Code, values: Tensor, dither: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ``(codes, scales)`` of fp32 ``values``: the nearest codes, or with ``dither`` (int64, 32 bits per element)
    stochastic rounding to one of the two neighbours. In the unsigned code, only zero becomes 0; in the signed one, also
    values next to it."""
    flat = values.detach().reshape(-1)
    magnitude = flat.abs()
    scales = _largest(magnitude)
    factors = (torch.full_like(scales, code.span).div_(scales) * ABOVE).masked_fill_(scales == 0, 0.0)
    shifted = magnitude * _per_element(factors, flat.numel()) + OFFSET
    added = 1 << (code.shift - 1) if dither is None else code.dither_bits(dither.reshape(-1))
    last = BASE + (code.top << code.shift)
    found = ((_bits(shifted).clamp_(max=last) + added) >> code.shift) & 0xFF
    if code.signed:
        found |= ((_bits(flat) >> 24) & 128).masked_fill_(flat.isnan(), 0)
    else:
        found = torch.maximum(found, ((flat > 0) & (_per_element(scales, flat.numel()) > 0)).long())
    return found.to(torch.uint8).view(values.shape), scales


def _bits(values: Tensor) -> Tensor:
    """Return the bits of fp32 numbers, as int64."""
    return values.view(torch.int32).long() & _MASK


def _largest(magnitude: Tensor) -> Tensor:
    """Return the largest magnitudes [blocks], 0 for blocks below ``TINY``."""
    padded = torch.nn.functional.pad(magnitude, (0, -magnitude.numel() % BLOCK))
    largest = padded.view(-1, BLOCK).amax(1)
    return largest.masked_fill_(largest < TINY, 0.0)


def _per_element(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(BLOCK)[:numel]


# ---- dither ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DitherSequence:
    """A low-discrepancy sequence of 32-bit numbers: increments per update and per element, irrational fractions of
    2**32, so that the numbers of one element, and those of one update, fill the range evenly (H. Weyl 1916). Rounding
    errors cancel sooner than with independent random numbers."""

    update: int
    element: int
    high: int
    """Increment for the upper half of an element's index."""

    def dither(self, step: int, start: int, like: Tensor) -> Tensor:
        """Return 32 bits per element of ``like`` (int64, flat), from the step and the element's index in its parameter;
        the first element has index ``start``."""
        index = torch.arange(start, start + like.numel(), device=like.device)
        return (step * self.update + (index & _MASK) * self.element + (index >> 32) * self.high) & _MASK


CODE_DITHER = DitherSequence(0x6A09E667, 0x9E3779B9, 0x85EBCA6B)
PARAM_DITHER = DitherSequence(0x9E3779B9, 0xBB67AE85, 0xC2B2AE35)


def round_stochastically(values: Tensor, dither: Tensor) -> Tensor:
    """Round fp32 ``values`` stochastically to bfloat16."""
    bits = _bits(values.contiguous())
    rounded = (bits + (dither.view(values.shape) >> 16)) >> 16
    rounded = torch.where(values.isnan(), 0x7FC0, rounded)
    return torch.where(rounded >= 0x8000, rounded - 0x10000, rounded).to(torch.int16).view(torch.bfloat16)
