"""Floating-point numbers of 4, 6, 8 and 12 bits."""

from deepspeed.ops.fp_quantizer.quantize import FP_Quantize, Quantizer, matmul_fp8

__all__ = ["FP_Quantize", "Quantizer", "matmul_fp8"]
