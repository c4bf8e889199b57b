"""Dropout without a mask: a hash of element index and seed decides what is dropped, the same as on the host."""

# Kernels are Triton, not Python: the types of their arguments mean nothing to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def mixed(x):
    """Return a hash of uint32 values."""
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def kept(index, seed_low, seed_high, limit):
    """Return which elements of ``index`` (int64) are kept; ``limit``: the drop probability times 2^32."""
    high = mixed(seed_high.to(tl.uint32) + (index >> 32).to(tl.uint32))
    random = mixed(index.to(tl.uint32) ^ mixed(seed_low.to(tl.uint32) + high))
    return random >= limit.to(tl.uint32)


@triton.jit(do_not_specialize=["seed_low", "seed_high", "limit", "scale"])
def _dropout_kernel(x, residual, out, numel, seed_low, seed_high, limit, scale, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32) * scale
    value = tl.where(kept(index, seed_low, seed_high, limit), value, 0.0)
    if residual is not None:
        value += tl.load(residual + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)


def arguments(ratio: float, seed: int) -> tuple[int, int, int, float]:
    """Return the kernels' arguments: halves of the seed and the limit, as int32, and the scale of kept elements."""
    return signed(seed), signed(seed >> 32), signed(int(ratio * 2**32)), 1.0 / (1.0 - ratio)


def signed(word: int) -> int:
    """Return the lowest 32 bits as int32."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def dropped(x: Tensor, ratio: float, seed: int, residual: Tensor | None = None) -> Tensor:
    """Drop elements of ``x`` with probability ``ratio`` below 1, scale the others, and add ``residual``. Gradients use
    the same function."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        rest = None if residual is None else residual.contiguous()
        with torch.cuda.device_of(x):
            _dropout_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
                x,
                rest,
                out,
                x.numel(),
                *arguments(ratio, seed),
                BLOCK=_BLOCK,
                num_warps=4,
                enable_fp_fusion=False,
            )
    return out
