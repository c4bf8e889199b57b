"""Attention of one block of queries to one block of keys, with the log-sum-exp that joins blocks.

Each kernel is a pair: ``forward(q, k, v, mask, scale) -> (out, lse)`` and ``backward(grad, q, k, v, out, lse, mask,
scale) -> (dq, dk, dv)``, where out and lse in backward are those of *all* blocks. q and out are [batch, heads, rows,
head size], k and v [batch, heads that share them, columns, head size], lse [batch, heads, rows] in fp32, mask bool,
broadcastable to [batch, heads, rows, columns], or None. The log-sum-exp of a row that
sees nothing is -inf, its output 0.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

_aten = torch.ops.aten


class BlockKernel(Protocol):
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Plain:
    """Matrix products in fp32 (fp64 if the inputs are): any device and any mask; needs rows x columns memory."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, mask, scale)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - _finite(lse).unsqueeze(-1))
        out = weights @ _repeated(v, q).to(weights.dtype)
        return out.to(q.dtype), lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = self._scores(q, k, mask, scale)
        weights = torch.exp(scores - _finite(lse).to(scores.dtype).unsqueeze(-1))
        wide = grad.to(weights.dtype)
        dv = weights.mT @ wide
        spread = (wide * out.to(wide.dtype)).sum(-1, keepdim=True)
        dscores = weights * (wide @ _repeated(v, q).to(wide.dtype).mT - spread) * scale
        dq = dscores @ _repeated(k, q).to(wide.dtype)
        dk = dscores.mT @ q.to(wide.dtype)
        return dq.to(q.dtype), _summed(dk, k).to(k.dtype), _summed(dv, v).to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = (q.to(dtype) @ _repeated(k, q).to(dtype).mT) * scale
        return scores if mask is None else scores.masked_fill(~mask, -math.inf)


class CpuFlash:
    """Torch's flash attention for CPUs, which takes masks and shared heads, and gives its log-sum-exp."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=_additive(mask, q.dtype), scale=scale
        )
        if mask is not None:  # the kernel gives 0 for rows that see nothing
            lse = lse.masked_fill(~mask.any(-1), -math.inf)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, _finite(lse), 0.0, False, attn_mask=_additive(mask, q.dtype), scale=scale
        )


PLAIN, CPU_FLASH = Plain(), CpuFlash()


def kernel_for(q: Tensor, v: Tensor) -> BlockKernel:
    """The fastest kernel that can compute blocks of these tensors."""
    return CPU_FLASH if q.is_cpu and q.shape[-1] == v.shape[-1] else PLAIN


def _finite(lse: Tensor) -> Tensor:
    """Rows that see nothing have no weights whatever is subtracted: exp(-inf - 0) = 0."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _repeated(k: Tensor, q: Tensor) -> Tensor:
    """One head of keys for each head of queries."""
    group = q.shape[1] // k.shape[1]
    return k if group == 1 else k.repeat_interleave(group, dim=1)


def _summed(grad: Tensor, k: Tensor) -> Tensor:
    group = grad.shape[1] // k.shape[1]
    return grad if group == 1 else grad.unflatten(1, (k.shape[1], group)).sum(2)
