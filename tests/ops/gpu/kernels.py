"""Kernels of tests. Import it where Triton is."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from deepspeed.ops.gpu.dropout import kept


@triton.jit
def which(out, start, low, high, limit):
    """Return which of 256 elements from 1024 ``start`` on dropout keeps."""
    index = start.to(tl.int64) * 1024 + tl.arange(0, 256)
    tl.store(out + tl.arange(0, 256), kept(index, low, high, limit).to(tl.int32))
