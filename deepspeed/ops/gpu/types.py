"""Triton's names of dtypes, and differences of the Triton interpreter."""

from __future__ import annotations

import os

import torch
import triton.language as tl

from deepspeed.ops.native import DTYPE_CODES

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
"""True: kernels of this process are interpreted on the host, in numpy (Triton reads the variable at import)."""

FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Storage dtypes of kernels; they compute in fp32."""

FLOAT_OF_CODE = {DTYPE_CODES[dtype]: kind for dtype, kind in FLOATS.items()}
"""The same by their codes in `native.Storage`."""


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """Return the operand dtype of a matrix product: the storage dtype, for the tensor cores. Under the interpreter,
    bfloat16 becomes fp32: numpy has no bfloat16, and would multiply the bit patterns."""
    if INTERPRETED and dtype is torch.bfloat16:
        return tl.float32
    return FLOATS[dtype]


def product_precision() -> str:
    """Return the precision of fp32 products that torch has been set to."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
