"""Products with quantized matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.ops.fp_quantizer.quantize import Quantizer


def matmul_fp8(
    inp: Tensor, weight: Tensor, scale: Tensor, quantization_group_size: int, quantizer: Quantizer
) -> Tensor:
    """``inp @ weight`` for a matrix that ``quantizer`` has quantized last, given as its codes and scales.

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
    return matmul_fp8_fallback(inp, weight, scale, quantization_group_size, quantizer)


def matmul_fp8_fallback(
    inp: Tensor, weight: Tensor, scale: Tensor, quantization_group_size: int, quantizer: Quantizer
) -> Tensor:
    """The same by way of the dequantized matrix."""
    return torch.matmul(inp, quantizer.dequantize(weight, scale=scale))
