"""Group-wise quantization of tensors to small floating-point numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.formats.small_floats import FORMATS, FloatGroups


class Quantizer(ABC):
    """Base class of quantizers; ``group_size`` values share a scale."""

    def __init__(self, group_size: int = 512) -> None:
        self.group_size = group_size

    @abstractmethod
    def quantize(
        self,
        input: Tensor,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        stochastic_mode: bool = False,
        return_meta_tensor: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]: ...

    @abstractmethod
    def dequantize(
        self,
        input_q: Tensor,
        fp_out: Tensor | None = None,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        scale: Tensor | None = None,
    ) -> Tensor: ...


class FP_Quantize(Quantizer):
    """Quantizes to floating-point numbers of 4 (E2M1), 6 (E3M2), 8 (E4M3) or 12 (E7M4) bits.

    The largest magnitude of a group is mapped to the largest of the format; all others are rounded to nearest, ties to
    even. A quantized tensor is uint8 [groups, group size * bits / 8 + 4]: packed codes, then the group's scale in fp32.
    The quantizer remembers shape and dtype of the last tensor it quantized, which `dequantize` restores.

    Args:
        quantization_config: has ``group_size`` (`deepspeed.transforms.lora.QuantizationConfig`), or is that number;
            None: 512.
        group_size: overrides that of the config.
    """

    def __init__(self, quantization_config: Any = None, group_size: int | None = None) -> None:
        if isinstance(quantization_config, int):
            quantization_config, group_size = None, quantization_config
        super().__init__(group_size or getattr(quantization_config, "group_size", 512))
        self.q_config = quantization_config
        self.orig_dtype: torch.dtype | None = None
        self.orig_shape: torch.Size | None = None
        self.scale: Tensor | None = None
        self.num_groups = 0
        """Number of groups of the last quantized tensor."""

    def quantize(
        self,
        input: Tensor,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        stochastic_mode: bool = False,
        return_meta_tensor: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Quantize a tensor of any floating-point dtype and size (the last group is zero-padded).

        Args:
            input: the tensor; unchanged.
            q_bits: 4, 6, 8 or 12.
            q_mantisa_bits: of the format; determined by ``q_bits``.
            stochastic_mode: unbiased stochastic rounding.
            return_meta_tensor: return codes and scales separately.

        Returns:
            The quantized tensor, or (codes, scales [groups, 1]); codes of 8 bits have the shape of ``input`` if the
            groups divide it.

        Raises:
            ValueError: another number of bits, or groups whose codes are not whole bytes.
        """
        groups = self._groups(q_bits)
        self.orig_dtype, self.orig_shape = input.dtype, input.shape
        self.num_groups = -(-input.numel() // self.group_size)
        codes, self.scale = groups.encode(
            input.detach(), stochastic=stochastic_mode, separate_scales=return_meta_tensor
        )
        if not return_meta_tensor:
            return codes
        same = q_bits == 8 and codes.numel() == input.numel()
        return (codes.view(input.shape) if same else codes), self.scale

    def dequantize(
        self,
        input_q: Tensor,
        fp_out: Tensor | None = None,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Return the values of a quantized tensor.

        Args:
            input_q: from `quantize`.
            fp_out: output tensor; None: a new tensor of the original shape and dtype.
            q_bits, q_mantisa_bits: as for `quantize`.
            scale: the scales, if ``input_q`` has only codes.

        Raises:
            RuntimeError: nothing has been quantized yet, and there is no ``fp_out``.
        """
        if fp_out is None:
            if self.orig_shape is None:
                raise RuntimeError("dequantize needs fp_out, or a tensor that this quantizer produced")
            fp_out = torch.empty(self.orig_shape, dtype=self.orig_dtype, device=input_q.device)
        return self._groups(q_bits).decode(input_q, fp_out, scale)

    def selective_dequantize(
        self,
        input_q: Tensor,
        indexes: Tensor,
        fp_out: Tensor | None = None,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Dequantize only ``indexes`` along the first dim of the original tensor; the rest is not read.

        Raises:
            RuntimeError: nothing has been quantized yet. ValueError: groups that do not divide a row.
        """
        if self.orig_shape is None:
            raise RuntimeError("selective_dequantize needs a tensor that this quantizer produced")
        each = self.orig_shape[1:].numel()
        if each % self.group_size:
            raise ValueError(f"group_size={self.group_size} does not divide the {each} values of a row")
        rows = self.orig_shape[0]
        chosen = indexes.to(input_q.device, torch.int64)
        part = input_q.reshape(rows, each // self.group_size, -1)[chosen].flatten(0, 1)
        if scale is not None:
            scale = scale.reshape(rows, -1)[chosen].reshape(-1, 1)
        if fp_out is None:
            shape = (len(chosen), *self.orig_shape[1:])
            fp_out = torch.empty(shape, dtype=self.orig_dtype, device=input_q.device)
        return self._groups(q_bits).decode(part, fp_out, scale)

    def get_scales(self) -> Tensor | None:
        """Return the scales of the last quantized tensor, [groups, 1] in fp32."""
        return self.scale

    def to(self, *args: Any, **kwargs: Any) -> FP_Quantize:
        """Move the scales. Returns ``self``."""
        if self.scale is not None:
            self.scale = self.scale.to(*args, **kwargs)
        return self

    def _groups(self, bits: int) -> FloatGroups:
        if bits not in FORMATS:
            raise ValueError(
                f"q_bits={bits}: supported floating-point widths are {', '.join(map(str, FORMATS))} bits"
            )
        if self.group_size * bits % 24 and bits in (6, 12) or self.group_size * bits % 8:
            raise ValueError(
                f"group_size={self.group_size} with q_bits={bits}: the group size must be a multiple of 4"
            )
        return FloatGroups(FORMATS[bits], self.group_size)


def matmul_fp8(
    inp: Tensor, weight: Tensor, scale: Tensor, quantization_group_size: int, quantizer: Quantizer
) -> Tensor:
    """Compute ``inp @ weight`` for the matrix last quantized by ``quantizer``, given as its codes and scales.

    Args:
        inp: [.., rows of the matrix].
        weight, scale: from ``quantizer.quantize(matrix, return_meta_tensor=True)``.
        quantization_group_size: that of the quantizer.

    Raises:
        ValueError: another group size.
    """
    if quantization_group_size != quantizer.group_size:
        raise ValueError(
            f"quantization_group_size={quantization_group_size}, but the quantizer has "
            f"group_size={quantizer.group_size}"
        )
    return torch.matmul(inp, quantizer.dequantize(weight, scale=scale))
