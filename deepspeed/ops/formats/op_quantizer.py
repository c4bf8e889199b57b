"""The op ``quantizer``: tensors as 8-bit or 4-bit integers in groups.

Codes are stored in int8 tensors; two 4-bit codes share a byte, the first in its lower half. A group's parameters are
fp32, and a code stands for ``code * params[0]`` (symmetric) or ``code * params[0] + params[1]`` (asymmetric). Symmetric
groups use the codec of ``zero_quantized_gradients`` (``deepspeed/ops/formats/codecs.py``) and its kernels.
"""

from __future__ import annotations

import enum
import math
from typing import ClassVar

import torch
from torch import Tensor

from deepspeed.ops.formats.codecs import BlockCodec
from deepspeed.ops.formats.integers import asymmetric_levels, divisors, symmetric_levels
from deepspeed.ops.formats.packing import pack_bits

_SCALE_BYTES = 4


class QuantizationType(enum.IntEnum):
    """Range of a group's codes: symmetric around 0, or from its smallest to its largest value."""

    Symmetric = 0
    Asymmetric = 1


Symmetric, Asymmetric = QuantizationType.Symmetric, QuantizationType.Asymmetric


def quantize(input_vals: Tensor, groups: int, num_bits: int, quant_type: QuantizationType) -> list[Tensor]:
    """Quantize a tensor of any floating-point dtype, split into ``groups`` equal runs of elements.

    Returns:
        int8 codes in the shape of the input (with 4 bits the last dim is half as long), and parameters fp32
        [groups, 1], or [groups, 2] if ``quant_type`` is ``Asymmetric``. The error is at most half a step.

    Raises:
        ValueError: other bits, or no such equal groups (with 4 bits, of an even number of elements).
    """
    codes, params = _encoded(input_vals.detach(), groups, num_bits, QuantizationType(quant_type))
    return [codes.view(_shape_of_codes(input_vals, num_bits)), params]


def dequantize(
    quantized_data: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: QuantizationType
) -> Tensor:
    """Return the fp16 values of ``quantize``'s results."""
    return _decoded(quantized_data, params, groups, num_bits, QuantizationType(quant_type), torch.float16)


def dequantize_fp32(
    quantized_data: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: QuantizationType
) -> Tensor:
    """Return the fp32 values of ``quantize``'s results."""
    return _decoded(quantized_data, params, groups, num_bits, QuantizationType(quant_type), torch.float32)


class CUDAQuantizer:
    """Quantizes weights to symmetric 8 bits on any device, in as few groups as ``target_group_size`` allows, or in a
    single one if no such number divides the weights. (The name is the documented one.)
    """

    target_group_size: ClassVar[int] = 8000
    """Most elements per group."""
    _MIN_GROUP: ClassVar[int] = 16

    def quantize(self, param: Tensor, groups: int | None = None) -> list[Tensor]:
        """Return codes and scales. ValueError: the elements cannot be split into that many equal groups."""
        return quantize(param, groups or self._groups(param.numel()), 8, Symmetric)

    def dequantize(self, quantized_param: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, in fp16 unless ``dtype`` is given."""
        return _decoded(quantized_param, scale, scale.numel(), 8, Symmetric, dtype or torch.float16)

    def _groups(self, numel: int) -> int:
        least = max(1, math.ceil(numel / self.target_group_size))
        return next((n for n in range(least, numel // self._MIN_GROUP + 1) if numel % n == 0), 1)


def _encoded(values: Tensor, groups: int, bits: int, kind: QuantizationType) -> tuple[Tensor, Tensor]:
    """Return int8 codes [groups, bytes] and parameters."""
    rows = _rows(values, groups, bits)
    if kind is Symmetric and rows.shape[1] % 2 == 0:
        payloads = _codec(rows.shape[1], bits).encode(rows)
        codes = payloads[:, _SCALE_BYTES : _SCALE_BYTES + rows.shape[1] * bits // 8]
        return codes.contiguous().view(torch.int8), payloads[:, :_SCALE_BYTES].contiguous().view(
            torch.float32
        )
    wide = rows.float()
    if kind is Symmetric:  # the codec takes even counts only
        levels, scale = symmetric_levels(wide, bits, narrow=True)
        return levels.to(torch.int8), scale
    levels, scale, low = asymmetric_levels(wide, bits, from_least=True)
    scale = divisors(scale)  # a group of equal values: any step preserves it
    half = 2 ** (bits - 1)
    codes = levels.sub_(half).to(torch.int8)
    if bits == 4:
        codes = pack_bits(codes.view(torch.uint8) & 15, 4).view(torch.int8)
    return codes, torch.cat([scale, low + half * scale], dim=1)


def _decoded(
    data: Tensor, params: Tensor, groups: int, bits: int, kind: QuantizationType, dtype: torch.dtype
) -> Tensor:
    """Decode to the shape of the codes, with the last dim as long as ``quantize``'s input."""
    columns = 2 if kind is Asymmetric else 1
    if bits not in (4, 8) or groups < 1 or data.numel() % groups or params.numel() != groups * columns:
        raise ValueError(
            f"groups={groups}, num_bits={bits}: expected 4 or 8 bits, a multiple of {groups} code bytes "
            f"(got {data.numel()}) and {groups * columns} parameters (got {params.numel()})"
        )
    codes, params = data.reshape(groups, -1).view(torch.uint8), params.reshape(groups, columns).float()
    numel = codes.shape[1] * 8 // bits
    if numel % 2:
        values = codes.view(torch.int8).float() * params[:, :1]
    else:
        codec = _codec(numel, bits)
        payloads = codes.new_zeros(groups, codec.nbytes(numel))
        payloads[:, :_SCALE_BYTES] = params[:, :1].contiguous().view(torch.uint8)
        payloads[:, _SCALE_BYTES : _SCALE_BYTES + codes.shape[1]] = codes
        values = codec.decode(payloads, numel)
    if kind is Asymmetric:
        values = values + params[:, 1:]
    return values.to(dtype).view(*data.shape[:-1], data.shape[-1] * 8 // bits)


def _rows(values: Tensor, groups: int, bits: int) -> Tensor:
    """Reshape to [groups, elements per group]."""
    if bits not in (4, 8):
        raise ValueError(f"num_bits={bits}: must be 4 or 8")
    if groups < 1 or not values.numel() or values.numel() % (groups * 8 // bits):
        even = " of an even number of elements, as two codes share a byte" if bits == 4 else ""
        raise ValueError(f"groups={groups}: {values.numel()} elements do not divide into equal groups{even}")
    return values.reshape(groups, -1)


def _codec(numel: int, bits: int) -> BlockCodec:
    """Return a codec with a single block: a payload is one scale and the codes."""
    return BlockCodec(bits, numel)


def _shape_of_codes(values: Tensor, bits: int) -> list[int]:
    if bits == 4 and values.shape[-1] % 2:
        raise ValueError(
            f"num_bits=4: two codes share a byte, but the last dimension is odd ({values.shape[-1]})"
        )
    return [*values.shape[:-1], values.shape[-1] * bits // 8]
