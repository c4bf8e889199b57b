"""Types of numbers as Triton names them, and what differs where Triton interprets kernels."""

from __future__ import annotations

import os

import torch
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
"""Whether kernels of this process run on the host, in numpy (Triton reads the variable as it is imported)."""

FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What kernels store numbers in; they compute in fp32."""


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """In what a matrix product takes its factors: as they are stored, for the matrix units. numpy has no bfloat16, of
    which the interpreter would multiply the bit patterns."""
    if INTERPRETED and dtype is torch.bfloat16:
        return tl.float32
    return FLOATS[dtype]


def product_precision() -> str:
    """Return the precision of fp32 products that torch has been set to."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
