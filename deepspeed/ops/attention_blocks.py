"""Attention of one block of queries to one block of keys, with the log-sum-exp that merges blocks.

Each kernel has ``supports``, and a pair of functions: ``forward(q, k, v, mask, scale) -> (out, lse)`` and
``backward(grad, (q, k, v), out, lse, mask, scale) -> (dq, dk, dv)``, where out and lse in backward are those of *all*
blocks. q and out are [batch, heads, rows, head size], k and v [batch, kv heads, columns, head size], lse [batch, heads,
rows] in fp32 (fp64 for such queries). The log-sum-exp of a fully masked row is -inf, its output 0.
"""

from __future__ import annotations

import enum
import math
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

_aten = torch.ops.aten


class BlockOrder(enum.Enum):
    """Masking of columns by position alone."""

    CAUSAL = "rows and columns are the same tokens; each attends to itself and earlier ones"


CAUSAL = BlockOrder.CAUSAL
QKV: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, or their gradients."""
Mask: TypeAlias = Tensor | BlockOrder | None
"""Bool, or floats that are added to the scores (-inf: masked), broadcastable to [batch, heads, rows, columns]; CAUSAL;
or None: nothing is masked."""


class BlockKernel(Protocol):
    def supports(self, q: Tensor, v: Tensor, mask: Mask) -> bool:
        """Return whether the kernel supports blocks of such tensors."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]: ...

    def backward(self, grad: Tensor, qkv: QKV, out: Tensor, lse: Tensor, mask: Mask, scale: float) -> QKV: ...


class Plain:
    """Matrix products in fp32 (fp64 if the inputs are): any device and any mask; uses rows x columns memory."""

    def supports(self, q: Tensor, v: Tensor, mask: Mask) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, mask, scale)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - finite(lse).unsqueeze(-1))
        out = weights @ _repeated(v, q).to(weights.dtype)
        return out.to(q.dtype), lse

    def backward(self, grad: Tensor, qkv: QKV, out: Tensor, lse: Tensor, mask: Mask, scale: float) -> QKV:
        q, k, v = qkv
        scores = self._scores(q, k, mask, scale)
        weights = torch.exp(scores - finite(lse).to(scores.dtype).unsqueeze(-1))
        wide = grad.to(weights.dtype)
        dv = weights.mT @ wide
        delta = (wide * out.to(wide.dtype)).sum(-1, keepdim=True)
        dscores = weights * (wide @ _repeated(v, q).to(wide.dtype).mT - delta) * scale
        dq = dscores @ _repeated(k, q).to(wide.dtype)
        dk = dscores.mT @ q.to(wide.dtype)
        return dq.to(q.dtype), _summed(dk, k).to(k.dtype), _summed(dv, v).to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, mask: Mask, scale: float) -> Tensor:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = (q.to(dtype) @ _repeated(k, q).to(dtype).mT) * scale
        if mask is None:
            return scores
        if isinstance(mask, BlockOrder):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril_()
        if mask.is_floating_point():
            return scores + mask
        return scores.masked_fill(~mask, -math.inf)


class CpuFlash:
    """Torch's flash attention for CPUs, which supports masks and grouped heads, and returns the log-sum-exp."""

    def supports(self, q: Tensor, v: Tensor, mask: Mask) -> bool:
        """Return whether the kernel applies; also for tensors without values, for which memory is counted."""
        return (q.is_cpu or q.is_meta) and q.shape[-1] == v.shape[-1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is CAUSAL, attn_mask=_additive(mask, q.dtype), scale=scale
        )
        if isinstance(mask, Tensor):  # the kernel returns 0 for fully masked rows
            seen = mask > -math.inf if mask.is_floating_point() else mask
            lse = lse.masked_fill(~seen.any(-1), -math.inf)
        return out, lse

    def backward(self, grad: Tensor, qkv: QKV, out: Tensor, lse: Tensor, mask: Mask, scale: float) -> QKV:
        given, added = (grad, *qkv, out, finite(lse)), _additive(mask, grad.dtype)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, mask is CAUSAL, attn_mask=added, scale=scale
        )


class CudaFlash:
    """Torch's flash attention for CUDA: 16-bit, no mask but CAUSAL, grouped heads, without rows x columns memory. T.
    Dao: FlashAttention-2: Faster attention with better parallelism and work partitioning, 2023."""

    SIZES = range(8, 257, 8)

    def supports(self, q: Tensor, v: Tensor, mask: Mask) -> bool:
        size, half = q.shape[-1], q.dtype in (torch.float16, torch.bfloat16)
        return (
            q.is_cuda and half and size == v.shape[-1] and size in self.SIZES and not isinstance(mask, Tensor)
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        found = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, self._is_causal(mask), False, scale=scale
        )
        return found[0], found[1]

    def backward(self, grad: Tensor, qkv: QKV, out: Tensor, lse: Tensor, mask: Mask, scale: float) -> QKV:
        no_random = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # unused without dropout
        sizes = (None, None, qkv[0].shape[2], qkv[1].shape[2])  # rows, columns
        rest = (0.0, self._is_causal(mask), no_random, no_random.new_zeros(()))
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, *qkv, out, lse, *sizes, *rest, scale=scale
        )

    def _is_causal(self, mask: Mask) -> bool:
        if isinstance(mask, Tensor):
            raise ValueError("flash attention for CUDA does not support masks: use kernel_for()")
        return mask is CAUSAL


PLAIN, CPU_FLASH, CUDA_FLASH = Plain(), CpuFlash(), CudaFlash()
KERNELS: tuple[BlockKernel, ...] = (CPU_FLASH, CUDA_FLASH, PLAIN)
"""Fastest first; the last one supports everything."""


def kernel_for(q: Tensor, v: Tensor, mask: Mask) -> BlockKernel:
    """Return the fastest kernel that supports blocks of these tensors."""
    return next(kernel for kernel in KERNELS if kernel.supports(q, v, mask))


class JoinedBlocks:
    """Accumulates the attention to several blocks: ``out``, and the log-sum-exp of its weights, ``lse``."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        wide = torch.promote_types(query.dtype, torch.float32)
        self.out = torch.zeros((*query.shape[:-1], value.shape[-1]), dtype=wide, device=query.device)
        self.lse = torch.full(query.shape[:-1], -math.inf, dtype=wide, device=query.device)

    def add(self, out: Tensor, lse: Tensor) -> None:
        together = torch.logaddexp(self.lse, lse)
        base = finite(together)
        self.out *= torch.exp(self.lse - base).unsqueeze(-1)
        self.out += out * torch.exp(lse - base).unsqueeze(-1)
        self.lse = together


def finite(lse: Tensor) -> Tensor:
    """Replace -inf by 0: fully masked rows then have zero weights, exp(-inf - 0) = 0."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _additive(mask: Mask, dtype: torch.dtype) -> Tensor | None:
    if not isinstance(mask, Tensor):
        return None
    if mask.is_floating_point():
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _repeated(k: Tensor, q: Tensor) -> Tensor:
    """Repeat each head of keys for the query heads that share it."""
    group = q.shape[1] // k.shape[1]
    return k if group == 1 else k.repeat_interleave(group, dim=1)


def _summed(grad: Tensor, k: Tensor) -> Tensor:
    group = grad.shape[1] // k.shape[1]
    return grad if group == 1 else grad.unflatten(1, (k.shape[1], group)).sum(2)
