"""Small floating-point formats: a sign, an exponent, a mantissa; with subnormals, without infinities.

The formats of 4, 6 and 8 bits are E2M1, E3M2 and E4M3 of the OCP specifications (Microscaling formats 1.0; 8-bit
floating point 1.0, in which the largest code of E4M3 is NaN); the 12-bit format is E7M4, defined likewise.

Groups of such numbers, each with a scale, are encoded and decoded by a GPU kernel, by a host kernel in one pass over
memory (``csrc/codec``), or in PyTorch, with the same bits except for stochastic rounding.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.ops import gpu, native
from deepspeed.ops.formats.packing import pack_bits, unpack_bits

_SCALE_BYTES = 4


@dataclass(frozen=True)
class Format:
    """A format of 1 + ``exponent`` + ``mantissa`` bits. ``codes``: number of magnitudes."""

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
        """Return the codes (int32, below 2 to the power of ``bits``) of the nearest numbers, ties to even, saturating.
        ``stochastic``: round to one of the two neighbours, unbiased. ``x`` is fp32."""
        magnitude = x.abs()
        _, exponent = torch.frexp(magnitude)
        smallest = 1 - self.bias  # exponent of subnormal numbers and of 0
        exponent = (exponent - 1).clamp_(min=smallest).masked_fill_(magnitude == 0, smallest)
        steps = torch.ldexp(magnitude, self.mantissa - exponent)
        steps = (steps + torch.rand_like(steps)).floor_() if stochastic else steps.round_()
        code = ((exponent + (self.bias - 1)) << self.mantissa) + steps.to(torch.int32)
        code.clamp_(min=0, max=self.codes - 1)
        return code | (torch.signbit(x).to(torch.int32) << (self.bits - 1))

    def table(self, device: torch.device) -> Tensor:
        """Return the value of each code, in fp32."""
        positive = self._magnitudes()
        unused = torch.full(((1 << (self.bits - 1)) - self.codes,), torch.nan, dtype=torch.float64)
        positive = torch.cat([positive, unused])
        return torch.cat([positive, -positive]).to(torch.float32).to(device)

    def _magnitudes(self) -> Tensor:
        """Return the magnitudes in fp64, by definition."""
        code = torch.arange(self.codes, dtype=torch.int64)
        exponent, fraction = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        normal = exponent > 0
        significand = fraction + normal.to(torch.int64) * (1 << self.mantissa)
        return torch.ldexp(significand.double(), exponent.clamp(min=1) - self.bias - self.mantissa)


class _Groups(ctypes.Structure):
    """The C struct ``ds_float_groups``."""

    _fields_ = native.fields("codes scales", "stride scale_stride numel group", "", "bits")


FORMATS = {4: Format(2, 1, 8), 6: Format(3, 2, 32), 8: Format(4, 3, 127), 12: Format(7, 4, 2048)}
"""Formats by number of bits."""


@dataclass(frozen=True)
class FloatGroups:
    """Groups of ``size`` elements of a tensor, each with an fp32 scale that maps the largest magnitude of the group to
    the largest of ``form``. The last group is zero-padded."""

    form: Format
    size: int

    @property
    def width(self) -> int:
        """Bytes of a group's codes."""
        return self.size * self.form.bits // 8

    def encode(
        self, values: Tensor, *, stochastic: bool = False, separate_scales: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return uint8 codes [groups, width], followed by the scales in each row unless ``separate_scales``, and the
        scales [groups, 1]. ``stochastic``: unbiased random rounding."""
        found = self._encode_on_gpu(values, stochastic)
        if found is None and not stochastic:
            both = self._encode_on_host(values, separate_scales)
            if both is not None:
                return both
        codes, scale = found or self._encode_in_torch(values, stochastic)
        return (codes if separate_scales else torch.cat([codes, scale.view(torch.uint8)], dim=1)), scale

    def decode(self, packed: Tensor, out: Tensor, scale: Tensor | None = None) -> Tensor:
        """Decode ``packed`` into ``out`` and return it; ``scale``: the scales, if encoded separately."""
        if out.is_contiguous() and gpu.usable(packed, out, scale):
            from deepspeed.ops.gpu import small_floats as kernels  # imports Triton

            if kernels.supports(out, self.size):
                kernels.decode(packed, scale, out, self.size, *self._constants[:3])
                return out
        codes, scales = self._parts(packed, scale)
        if not self._run_on_host("ds_decode_floats", out, codes, scales):
            out.copy_(self._values(codes, scales).flatten()[: out.numel()].view(out.shape))
        return out

    @property
    def _constants(self) -> tuple[int, int, int, float]:
        return self.form.exponent, self.form.mantissa, self.form.codes, self.form.largest

    def _encode_on_gpu(self, values: Tensor, stochastic: bool) -> tuple[Tensor, Tensor] | None:
        """Return codes and scales; None: there is no kernel."""
        if not gpu.usable(values):
            return None
        from deepspeed.ops.gpu import small_floats as kernels  # imports Triton

        if not kernels.supports(values, self.size):
            return None
        seed = int(torch.randint(2**31, ()).item()) if stochastic else None
        return kernels.encode(values, self.size, *self._constants, seed=seed)

    def _encode_on_host(self, values: Tensor, separate_scales: bool) -> tuple[Tensor, Tensor] | None:
        """Encode on the host like ``encode``; None: there is no kernel, or a value is not finite."""
        if not native.is_native(values):
            return None
        groups, width = -(-values.numel() // self.size), self.width
        rows = torch.empty(groups, width if separate_scales else width + _SCALE_BYTES, dtype=torch.uint8)
        scale = torch.empty(groups, 1)
        scales = scale.view(torch.uint8) if separate_scales else rows[:, width:]
        if not self._run_on_host("ds_encode_floats", values, rows[:, :width], scales):
            return None
        return rows, scale if separate_scales else scales.contiguous().view(torch.float32)

    def _run_on_host(self, kernel: str, values: Tensor, codes: Tensor, scales: Tensor) -> bool:
        """Run a native kernel on ``values``, which may be shorter than all groups, ``codes`` [groups, bytes] and
        ``scales`` [groups, 4], uint8, with rows of any stride. Returns False, with undefined contents, if it does not
        support them."""
        lib = native.library()
        if lib is None or not native.is_native(values) or sys.byteorder != "little":
            return False
        if codes.shape[0] * self.size < values.numel():
            return False
        for bytes_ in (codes, scales):
            if bytes_.device.type != "cpu" or bytes_.dtype is not torch.uint8 or bytes_.stride(-1) != 1:
                return False
        strides = codes.stride(0), scales.stride(0)
        groups = _Groups(
            codes.data_ptr(), scales.data_ptr(), *strides, values.numel(), self.size, self.form.bits
        )
        code, threads = native.DTYPE_CODES[values.dtype], torch.get_num_threads()
        return not getattr(lib, kernel)(ctypes.byref(groups), values.data_ptr(), code, threads)

    def _encode_in_torch(self, values: Tensor, stochastic: bool) -> tuple[Tensor, Tensor]:
        flat = values.reshape(-1).to(torch.float32)
        groups = torch.nn.functional.pad(flat, (0, -len(flat) % self.size)).view(-1, self.size)
        top, largest = groups.abs().amax(1, keepdim=True), self.form.largest
        scale = (top / largest).clamp(min=torch.finfo(torch.float32).tiny)
        scale = torch.where(top > 0, scale, 1.0)
        shares = groups / scale
        if self.form.bits == 8 and not stochastic:  # torch's conversion gives the same result faster
            return shares.clamp_(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8), scale
        return pack_bits(self.form.encode(shares, stochastic=stochastic), self.form.bits), scale

    def _parts(self, packed: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return codes [groups, width] and scales [groups, 4], both uint8."""
        if scale is None:
            rows = packed.reshape(-1, self.width + _SCALE_BYTES)
            return rows[:, : self.width], rows[:, self.width :]
        codes = packed.view(torch.uint8).reshape(-1, self.width)
        return codes, scale.float().reshape(-1, 1).view(torch.uint8)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return values [groups, size] in fp32."""
        scale = scales.contiguous().view(torch.float32)
        if self.form.bits == 8:
            return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32).mul_(scale)
        return self.form.table(codes.device)[unpack_bits(codes, self.form.bits).int()].mul_(scale)
