"""Small floating-point formats: a sign, an exponent, a mantissa; subnormal numbers, no infinities.

The formats of 4, 6 and 8 bits are E2M1, E3M2 and E4M3 of the OCP specifications (Microscaling formats 1.0; 8-bit
floating point 1.0, where the largest code of E4M3 is not a number); that of 12 bits is E7M4 in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A format of 1 + ``exponent`` + ``mantissa`` bits. ``codes``: how many magnitudes it has."""

    exponent: int
    mantissa: int
    codes: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def largest(self) -> float:
        return float(self._magnitudes()[-1])

    def encode(self, x: Tensor, *, stochastic: bool = False) -> Tensor:
        """Codes (int32, below 2 to the power of ``bits``) of the nearest numbers, ties to even; beyond the largest: the
        largest. ``stochastic``: of one of the two neighbours, so that the mean is ``x``. ``x`` in fp32."""
        magnitude = x.abs()
        _, exponent = torch.frexp(magnitude)
        smallest = 1 - self.bias  # that of subnormal numbers, and of 0
        exponent = (exponent - 1).clamp_(min=smallest).masked_fill_(magnitude == 0, smallest)
        steps = torch.ldexp(magnitude, self.mantissa - exponent)
        steps = (steps + torch.rand_like(steps)).floor_() if stochastic else steps.round_()
        code = ((exponent + (self.bias - 1)) << self.mantissa) + steps.to(torch.int32)
        code.clamp_(min=0, max=self.codes - 1)
        return code | (torch.signbit(x).to(torch.int32) << (self.bits - 1))

    def table(self, device: torch.device) -> Tensor:
        """The number of each code, in fp32."""
        positive = self._magnitudes()
        unused = torch.full(((1 << (self.bits - 1)) - self.codes,), torch.nan, dtype=torch.float64)
        positive = torch.cat([positive, unused])
        return torch.cat([positive, -positive]).to(torch.float32).to(device)

    def _magnitudes(self) -> Tensor:
        """In fp64, by their definition."""
        code = torch.arange(self.codes, dtype=torch.int64)
        exponent, fraction = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        normal = exponent > 0
        significand = fraction + normal.to(torch.int64) * (1 << self.mantissa)
        return torch.ldexp(significand.double(), exponent.clamp(min=1) - self.bias - self.mantissa)


FORMATS = {
    4: Format(2, 1, 8),
    6: Format(3, 2, 32),
    8: Format(4, 3, 127),
    12: Format(7, 4, 2048),
}
"""By bits."""
