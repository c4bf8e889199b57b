"""Attention of the Evoformer (over rows, columns and triangles), with its biases and all gradients.

J. Jumper et al.: Highly accurate protein structure prediction with AlphaFold, 2021, supplement 1.6. The scores of all
sequences are never materialized at once: forward saves the log-sum-exp of each row, and backward recomputes the weights
(T. Dao et al.: FlashAttention, 2022), several sequences at a time. On a GPU with Triton, dedicated kernels compute it
(``deepspeed.ops.gpu.evoformer_attention``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from deepspeed.ops.attention_blocks import finite
from deepspeed.ops.gpu import usable

Biases: TypeAlias = tuple[Tensor | None, Tensor | None]
"""The biases per key and per pair of tokens, or their gradients."""
_CHUNK = 1 << 22
"""Maximum number of scores at a time (16 MiB in fp32), but at least those of one sequence."""


class EvoformerFusedAttention(torch.autograd.Function):
    """``softmax(q @ k.T / sqrt(head size) + bias1 + bias2) @ v``; shapes as in `DS4Sci_EvoformerAttention`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias1: Tensor | None = None, bias2: Tensor | None = None
    ) -> Tensor:
        if _in_kernel(q, k, v, bias1, bias2):
            from deepspeed.ops.gpu import evoformer_attention as gpu

            out, lse = gpu.forward(q, k, v, bias1, bias2)
        else:
            out, lse = _forward(q, k, v, (bias1, bias2))
        ctx.save_for_backward(q, k, v, out, lse, bias1, bias2)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, bias1, bias2 = ctx.saved_tensors
        wanted = [
            torch.zeros_like(bias, dtype=_wide(q)) if bias is not None and needed else None
            for bias, needed in zip((bias1, bias2), ctx.needs_input_grad[3:], strict=True)
        ]
        return attention_bwd(grads[0], q, k, v, out, lse, bias1, bias2, *wanted)


def _forward(q: Tensor, k: Tensor, v: Tensor, biases: Biases) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = q.new_empty((*q.shape[:2], q.shape[3], q.shape[2]), dtype=_wide(q))
    for at, chunk in _chunks(q, k):
        scores = _scores(q, k, biases, at, chunk)
        lse[at, chunk] = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - finite(lse[at, chunk]).unsqueeze(-1))
        out[at, chunk] = (weights @ _heads(v, at, chunk)).transpose(1, 2).to(out.dtype)
    return out, lse


def attention_bwd(
    dO: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,  # noqa: E741 (the documented name)
    lse: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    bias1_grad: Tensor | None,
    bias2_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of the three inputs and of the biases.

    Args:
        dO: the gradient of the output.
        Q, K, V, bias1, bias2: the inputs.
        O, lse: output and log-sum-exp [batch, sequences, heads, tokens] of the forward.
        bias1_grad, bias2_grad: zeros in the shapes of the biases, in fp32 (fp64 for such inputs), to which gradients
            are added; None: not needed.
    """
    arguments = (dO, (Q, K, V), O, lse, (bias1, bias2), (bias1_grad, bias2_grad))
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (dO, Q, K, V, O))
    if not recorded and _in_kernel(Q, K, V, bias1, bias2):
        from deepspeed.ops.gpu import evoformer_attention as gpu

        dq, dk, dv = gpu.backward(*arguments)
    else:
        dq, dk, dv = _backward(*arguments)
    grad_biases = [
        None if grad is None or bias is None else grad.to(bias.dtype)
        for grad, bias in ((bias1_grad, bias1), (bias2_grad, bias2))
    ]
    return dq, dk, dv, grad_biases[0], grad_biases[1]


def _backward(
    grad: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    biases: Biases,
    bias_grads: Biases,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    for at, chunk in _chunks(q, k):
        scores = _scores(q, k, biases, at, chunk)
        weights = torch.exp(scores - finite(lse[at, chunk]).unsqueeze(-1))
        grad_out = _heads(grad, at, chunk)
        delta = (grad_out * _heads(out, at, chunk)).sum(-1, keepdim=True)
        dscores = weights * (grad_out @ _heads(v, at, chunk).mT - delta)
        dv[at, chunk] = (weights.mT @ grad_out).transpose(1, 2).to(dv.dtype)
        dq[at, chunk] = (dscores @ _heads(k, at, chunk) * scale).transpose(1, 2).to(dq.dtype)
        dk[at, chunk] = (dscores.mT @ _heads(q, at, chunk) * scale).transpose(1, 2).to(dk.dtype)
        if bias_grads[0] is not None:
            bias_grads[0][at, chunk] += dscores.sum((1, 2))[:, None, None]
        if bias_grads[1] is not None:
            bias_grads[1][at, 0] += dscores.sum(0)
    return dq, dk, dv


def DS4Sci_EvoformerAttention(Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
    """Compute attention within each of many sequences, with biases shared over sequences, or over heads and queries.

    Args:
        Q, K, V: [batch, sequences, tokens, heads, head size], in any floating-point dtype and on any device. Keys and
            values may have another number of tokens than queries.
        biases: none, one or two. The first, [batch, sequences, 1, 1, keys], is per key of each sequence (a mask); the
            second, [batch, 1, heads, queries, keys], is the same for all sequences (the pair bias). None omits one.
            Both have gradients.

    Returns:
        Like ``Q``. A row whose scores are all -inf is zero.

    Raises:
        ValueError: more than two biases, or shapes that do not fit.
    """
    if len(biases) > 2:
        raise ValueError(f"expected at most two biases, got {len(biases)}")
    if Q.dim() != 5 or K.shape != V.shape or Q.shape[:2] != K.shape[:2] or Q.shape[3:] != K.shape[3:]:
        raise ValueError(
            "Q, K and V must be [batch, sequences, tokens, heads, head size], with K and V of equal shape; "
            f"got {list(Q.shape)}, {list(K.shape)} and {list(V.shape)}"
        )
    batch, sequences, queries, heads, _ = Q.shape
    shapes = ((batch, sequences, 1, 1, K.shape[2]), (batch, 1, heads, queries, K.shape[2]))
    given = [*biases, None, None][:2]
    for number, (bias, shape) in enumerate(zip(given, shapes, strict=True), 1):
        if bias is not None and tuple(bias.shape) != shape:
            raise ValueError(f"bias {number} has shape {list(bias.shape)}, expected {list(shape)}")
    return EvoformerFusedAttention.apply(Q, K, V, *given)


def _in_kernel(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None) -> bool:
    """Return whether the GPU kernels support these tensors."""
    if not usable(q, k, v, *biases):
        return False
    from deepspeed.ops.gpu.softmax_steps import supports

    return (
        q.dtype == k.dtype == v.dtype and supports(q.dtype, q.shape[-1]) and 0 not in (q.numel(), k.numel())
    )


def _chunks(q: Tensor, k: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (batch index, slice of sequences) for each chunk."""
    each = max(1, q.shape[3] * q.shape[2] * k.shape[2])
    size = max(1, _CHUNK // each)
    for at in range(q.shape[0]):
        for start in range(0, q.shape[1], size):
            yield at, slice(start, start + size)


def _scores(q: Tensor, k: Tensor, biases: Biases, at: int, chunk: slice) -> Tensor:
    """Return the scores [sequences, heads, queries, keys] of a chunk."""
    bias1, bias2 = biases
    scores = (_heads(q, at, chunk) * q.shape[-1] ** -0.5) @ _heads(k, at, chunk).mT
    if bias1 is not None:
        scores += bias1[at, chunk]
    if bias2 is not None:
        scores += bias2[at]
    return scores


def _heads(x: Tensor, at: int, chunk: slice) -> Tensor:
    """Return a chunk as [sequences, heads, tokens, head size], in fp32 or fp64."""
    return x[at, chunk].transpose(1, 2).to(_wide(x))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
