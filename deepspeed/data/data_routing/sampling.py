"""Choice of the tokens that a layer keeps, as a pure function of the training position: no RNG state is used.

So the tokens are the same in recomputation, on tensor-parallel ranks, after a resume, and for any number of ranks: a
row of the global batch keeps the same tokens on any rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.base.tracing import untraced
from deepspeed.ops.random_ltd.dropping_utils import gpt_sample_tokens

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_POSITION_BITS = 24


@dataclass(frozen=True, slots=True)
class TokenPositions:
    """Position of a forward in training. ``step``: updates so far; ``part``: index of the micro-batch over all ranks
    in this step."""

    step: int
    part: int


class TokenSampler:
    """Draws the tokens of ``layers`` layers.

    Args:
        place: returns the position of the current forward; None: draw with torch's generator.
    """

    def __init__(
        self, layers: int, seed: int = 1234, place: Callable[[], TokenPositions] | None = None
    ) -> None:
        self.layers = layers
        self.seed = seed
        self.place = place
        self._drawn: tuple[object, Tensor] | None = None

    @untraced
    def draw(self, layer: int, kept: int, length: int, batch: int, device: torch.device) -> Tensor:
        """Return the ascending indices, int64 [batch, kept], of the tokens that a layer keeps in each row. Not
        compiled: steps are Python numbers, each of which would trigger a recompilation."""
        if self.place is None:
            return gpt_sample_tokens(kept, length, batch, 1, device)[0][0]
        place = self.place()
        key = (place, kept, length, batch, device)
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = key, self._all_layers(place, kept, length, batch, device)
        return self._drawn[1][layer]

    @torch.no_grad()
    def _all_layers(
        self, place: TokenPositions, kept: int, length: int, batch: int, device: torch.device
    ) -> Tensor:
        """Return the tokens with the smallest random numbers, [layers, batch, kept]. The low bits of a number are its
        position, so there are no ties and all devices agree."""
        base = hashlib.blake2b(repr((self.seed, place.step)).encode(), digest_size=8).digest()
        layers = torch.arange(self.layers, device=device).view(-1, 1, 1)
        rows = torch.arange(batch, device=device).view(-1, 1) + place.part * batch
        positions = torch.arange(length, device=device)
        number = _scrambled(layers + _signed(int.from_bytes(base, "little")))
        number = _scrambled(number + rows)
        number = _scrambled(number + positions)
        number = (number >> _POSITION_BITS << _POSITION_BITS) + positions
        return number.topk(kept, largest=False, sorted=False).indices.sort().values


def _scrambled(value: Tensor) -> Tensor:
    """Return the next values of SplitMix64 (Steele, Lea and Flood 2014), 64 bits in int64."""
    value = value * _signed(_GOLDEN) + _signed(_GOLDEN)
    value = (value ^ _shifted(value, 30)) * _signed(_FIRST)
    value = (value ^ _shifted(value, 27)) * _signed(_SECOND)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shift right logically: ``>>`` of int64 would extend the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
