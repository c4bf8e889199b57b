"""Chunked self-attention for long sequences, with saved chunks offloaded to host memory.

J. Yao, S. A. Jacobs, M. Tanaka, O. Ruwase, H. Subramoni, D. K. Panda: Training ultra long context language model with
fully pipelined distributed Transformer, 2024; blocks are joined by their log-sum-exp (T. Dao et al.: FlashAttention,
2022). Projections, rotary embedding, exchange between ranks and attention run for one chunk of the sequence at a time;
queries, keys and values of the whole sequence are never on the device together.

[Note: order of backward] Query chunks run last to first, each with all keys up to its own. When chunk i runs, every
later chunk has contributed to the gradients of keys and values i, and chunk i adds the final contribution: the
gradients of queries, keys and values i are complete at the same time, go through one exchange, and need one product
with the chunk's input. Only keys, values and their gradients move repeatedly between host and device: with
grouped-query attention, the smaller part.

[Note: which tokens] Each chunk of the *sequence* is sharded over all ranks: a rank holds its part of each chunk,
concatenated, so that all ranks have equal work under a causal mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.ops.attention_blocks import CAUSAL, JoinedBlocks, kernel_for
from deepspeed.parallel.sequence.assignment import HeadAssignment
from deepspeed.parallel.sequence.chunks import Prefetcher, SequenceChunk
from deepspeed.parallel.sequence.exchange import HeadExchange
from deepspeed.parallel.sequence.layer import apply_rotary_pos_emb, apply_rotary_pos_emb_backward
from deepspeed.parallel.tensor.cuts import even_sizes
from deepspeed.transforms.recompute.side_stream import SideStream

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, each [tokens of the sequence, 1, 1, rotated size]."""


def chunks_of(length: int, chunks: int, ranks: int) -> list[tuple[int, ...]]:
    """Return, for each chunk of ``length`` tokens, the number of tokens per rank (Note: which tokens)."""
    return [even_sizes(size, ranks) for size in even_sizes(length, chunks)]


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkedAttentionCall:
    """Settings of one `chunked_self_attention`. ``chunks``: from `chunks_of`; ``kv_heads`` divides ``heads``."""

    comm: Communicator
    chunks: Sequence[tuple[int, ...]]
    heads: int
    kv_heads: int
    size: int
    scale: float
    rotary: Rotary | None = None
    offload: bool = True
    stream: SideStream = field(default_factory=SideStream)

    @cached_property
    def plan(self) -> HeadAssignment:
        return HeadAssignment(self.heads, self.kv_heads, self.comm.size)

    @cached_property
    def starts(self) -> list[int]:
        """Start of each chunk in the sequence."""
        sizes = [sum(lengths) for lengths in self.chunks]
        return [sum(sizes[:at]) for at in range(len(sizes))]

    @cached_property
    def local(self) -> list[int]:
        """Number of tokens of each chunk on this rank."""
        return [lengths[self.comm.rank] for lengths in self.chunks]

    @property
    def widths(self) -> list[int]:
        """Widths of queries, keys and values over all heads."""
        return [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]

    def exchange(self, at: int) -> HeadExchange:
        return HeadExchange(self.comm, tuple(self.chunks[at]))

    def heads_of_all(self) -> list[tuple[tuple[int, ...], ...]]:
        """Return the heads of queries, keys and values that this rank sends to each other rank."""
        keys = self.plan.keys(self.comm.rank)
        return [self.plan.queries(self.comm.rank), keys, keys]

    def tables(self, at: int, like: Tensor) -> Rotary | None:
        """Return the rotary tables of one chunk, each [1, 1, tokens, rotated size], in the dtype of ``like``."""
        if self.rotary is None:
            return None
        stop = self.starts[at] + sum(self.chunks[at])
        cosines, sines = (
            each[self.starts[at] : stop].permute(1, 2, 0, 3).to(like.dtype) for each in self.rotary
        )
        return cosines, sines

    def keep(self, tensor: Tensor) -> SequenceChunk:
        return SequenceChunk(tensor, stream=self.stream, away=self.offload)


@untraced
def chunked_self_attention(
    call: ChunkedAttentionCall, x: Tensor, qkv_weight: Tensor, qkv_bias: Tensor | None, out_weight: Tensor
) -> Tensor:
    """Compute causal self-attention with its projections: x [own tokens, batch, hidden] -> [own tokens, batch, out].

    Args:
        call: heads, chunks, ranks.
        x: this rank's part of each chunk, concatenated.
        qkv_weight: [(heads + 2 kv_heads) * size, hidden]: the rows of all queries, then of keys, then of values.
        qkv_bias: [(heads + 2 kv_heads) * size], or None.
        out_weight: [out, heads * size].

    Differentiable once. Collective over ``call.comm``: two all-to-alls per chunk in forward, three in backward (a
    chunk's attention output is exchanged again instead of being saved twice).
    """
    keeping, kind = torch.is_grad_enabled(), x.device.type
    tensors: list[Tensor | None] = [x, qkv_weight, qkv_bias, out_weight]
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        tensors = [None if each is None else each.to(dtype) for each in tensors]
        with torch.autocast(kind, enabled=False):
            return _ChunkedAttention.apply(call, keeping, *tensors)  # pyright: ignore[reportReturnType]
    return _ChunkedAttention.apply(call, keeping, *tensors)  # pyright: ignore[reportReturnType]


class _SavedChunks(NamedTuple):
    """Tensors of one chunk saved for backward: [batch, own heads, all tokens of the chunk, size] each, and the input
    ``x``."""

    q: SequenceChunk
    k: SequenceChunk
    v: SequenceChunk
    out: SequenceChunk
    lse: SequenceChunk
    x: SequenceChunk


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: ChunkedAttentionCall,
        keeping: bool,
        x: Tensor,
        qkv_weight: Tensor,
        qkv_bias: Tensor | None,
        out_weight: Tensor,
    ) -> Tensor:
        result = x.new_empty(*x.shape[:2], out_weight.shape[0])
        kept: list[_SavedChunks] = []
        earlier: list[tuple[SequenceChunk, SequenceChunk]] = []
        parts = zip(x.split(call.local), result.split(call.local), strict=True)
        for at, (part, target) in enumerate(parts):
            ahead = Prefetcher(earlier)
            q, k, v = _heads(call, at, part, qkv_weight, qkv_bias)
            out, lse = _attend(call, q, k, v, ahead)
            context = call.exchange(at).collect((out,), (call.heads_of_all()[0],))[0]
            torch.mm(_rows(context), out_weight.T, out=target.view(-1, target.shape[-1]))
            pair = (call.keep(k), call.keep(v))
            earlier.append(pair)
            if keeping:
                kept.append(
                    _SavedChunks(call.keep(q), *pair, call.keep(out), call.keep(lse), call.keep(part))
                )
        ctx.call, ctx.kept = call, kept
        ctx.save_for_backward(qkv_weight, qkv_bias, out_weight)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        qkv_weight, qkv_bias, out_weight = ctx.saved_tensors
        backward = _ChunkBackward(ctx.call, ctx.kept, grads[0], qkv_weight, qkv_bias, out_weight)
        for at in reversed(range(len(ctx.kept))):
            backward.chunk(at)
        return None, None, *backward.result()


class _ChunkBackward:
    """Accumulates the gradients of input and weights from the last chunk to the first (Note: order of backward)."""

    def __init__(
        self,
        call: ChunkedAttentionCall,
        kept: list[_SavedChunks],
        grad: Tensor,
        qkv_weight: Tensor,
        qkv_bias: Tensor | None,
        out_weight: Tensor,
    ) -> None:
        self.call, self.kept = call, kept
        self.grads = grad.split(call.local)
        self.weights = (qkv_weight, qkv_bias, out_weight)
        self.dx = grad.new_empty(*grad.shape[:2], qkv_weight.shape[1])
        wide = torch.promote_types(grad.dtype, torch.float32)
        self.sums = [None if each is None else torch.zeros_like(each, dtype=wide) for each in self.weights]
        self.key_gradients: list[tuple[SequenceChunk, SequenceChunk] | None] = [None] * len(kept)
        self._load(len(kept) - 1)

    def _load(self, at: int) -> None:
        for chunk in (*self.kept[at], *(self.key_gradients[at] or ())) if at >= 0 else ():
            chunk.load_to_gpu()

    def chunk(self, at: int) -> None:
        call, here = self.call, self.kept[at]
        groups = [self._group(earlier) for earlier in range(at)]
        added = at + 1 < len(self.kept)  # later chunks have already created the sums
        ahead = Prefetcher(groups, (2, 3) if added else ())
        q, k, v, out, lse, x = (chunk.get_gpu_chunk() for chunk in here)
        grad = self._context_gradient(at, out)
        dq, dk, dv = self._attention(at, ahead, grad, (q, k, v, out, lse))
        for chunk in here:
            chunk.offload()
        self._load(at - 1)
        tables = call.tables(at, q)
        if tables is not None:
            dq, dk = (apply_rotary_pos_emb_backward(each, *tables) for each in (dq, dk))
        dk, dv = (_reduce_keys(call, each) for each in (dk, dv))
        given = [each.to(x.dtype) for each in (dq, dk, dv)]
        local = call.exchange(at).collect(given, call.heads_of_all())
        self._projection(at, x, torch.cat([_rows(each) for each in local], dim=1))

    def result(self) -> tuple[Tensor | None, ...]:
        pairs = zip(self.sums, self.weights, strict=True)
        return self.dx, *(
            total.to(weight.dtype) if total is not None and weight is not None else None
            for total, weight in pairs
        )

    def _group(self, at: int) -> tuple[SequenceChunk, ...]:
        here = self.kept[at]
        return here.k, here.v, *(self.key_gradients[at] or ())

    def _context_gradient(self, at: int, out: Tensor) -> Tensor:
        """Return the gradient of one chunk's attention output, and accumulate that of the output weight."""
        call, own = self.call, self.call.heads_of_all()[0]
        rows = self.grads[at].reshape(-1, self.grads[at].shape[-1])
        context = call.exchange(at).collect((out,), (own,))[0]
        total = self.sums[2]
        assert total is not None
        _add_product(total, rows, _rows(context))
        grad_context = (rows @ self.weights[2]).view(*self.grads[at].shape[:2], call.heads, call.size)
        return call.exchange(at).spread((grad_context.permute(1, 2, 0, 3),), (own,))[0]

    def _attention(
        self, at: int, ahead: Prefetcher, grad: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of one chunk's queries, keys and values, and accumulate those of earlier keys and
        values."""
        call, (q, k, v, out, lse) = self.call, kept
        wide = torch.promote_types(q.dtype, torch.float32)
        kernel = kernel_for(q, v, CAUSAL)
        dq, dk, dv = (
            each.to(wide) for each in kernel.backward(grad, (q, k, v), out, lse, CAUSAL, call.scale)
        )
        for earlier, (key, value, *totals) in enumerate(ahead):
            grad_q, grad_k, grad_v = kernel_for(q, value, None).backward(
                grad, (q, key, value), out, lse, None, call.scale
            )
            dq += grad_q
            if totals:
                totals[0] += grad_k
                totals[1] += grad_v
            else:
                self.key_gradients[earlier] = (call.keep(grad_k.to(wide)), call.keep(grad_v.to(wide)))
        begun = self.key_gradients[at]
        if begun is not None:
            dk += begun[0].get_gpu_chunk()
            dv += begun[1].get_gpu_chunk()
            self.key_gradients[at] = None
        return dq, dk, dv

    def _projection(self, at: int, x: Tensor, grad: Tensor) -> None:
        """Backpropagate ``grad`` [rows, (heads + 2 kv_heads) * size] through the projection of one chunk."""
        weight, total, bias_total = self.weights[0], self.sums[0], self.sums[1]
        assert weight is not None and total is not None
        _add_product(total, grad, x.reshape(-1, x.shape[-1]))
        if bias_total is not None:
            bias_total += grad.sum(0, dtype=bias_total.dtype)
        target = self.dx.split(self.call.local)[at]
        torch.mm(grad, weight, out=target.view(-1, target.shape[-1]))


def _heads(
    call: ChunkedAttentionCall, at: int, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries, keys and values of one chunk: all tokens, this rank's heads."""
    parts = torch.nn.functional.linear(x, weight, bias).split(call.widths, dim=-1)
    shaped = [each.unflatten(-1, (-1, call.size)).permute(1, 2, 0, 3) for each in parts]
    del parts
    q, k, v = call.exchange(at).spread(shaped, call.heads_of_all())
    tables = call.tables(at, q)
    if tables is not None:
        q, k = (apply_rotary_pos_emb(each, *tables) for each in (q, k))
    return q, _expand_keys(call, k), _expand_keys(call, v)


def _attend(
    call: ChunkedAttentionCall, q: Tensor, k: Tensor, v: Tensor, ahead: Prefetcher
) -> tuple[Tensor, Tensor]:
    """Compute the attention of one chunk to itself and all earlier ones, with its log-sum-exp."""
    joined = JoinedBlocks(q, v)
    joined.add(*kernel_for(q, v, CAUSAL).forward(q, k, v, CAUSAL, call.scale))
    for key, value in ahead:
        joined.add(*kernel_for(q, value, None).forward(q, key, value, None, call.scale))
    return joined.out.to(q.dtype), joined.lse


def _rows(heads: Tensor) -> Tensor:
    """Rearrange [batch, heads, tokens, size] into [tokens * batch, heads * size]."""
    return heads.permute(2, 0, 1, 3).reshape(-1, heads.shape[1] * heads.shape[3])


def _expand_keys(call: ChunkedAttentionCall, keys: Tensor) -> Tensor:
    """Expand to one key head per query head if this rank's query heads share them non-uniformly."""
    rank = call.comm.rank
    if call.plan.group_of(rank) is not None:
        return keys
    return keys.index_select(1, torch.tensor(call.plan.key_of_query(rank), device=keys.device))


def _reduce_keys(call: ChunkedAttentionCall, grad: Tensor) -> Tensor:
    rank = call.comm.rank
    if call.plan.group_of(rank) is not None:
        return grad
    shape = list(grad.shape)
    shape[1] = len(call.plan.keys_of(rank))
    index = torch.tensor(call.plan.key_of_query(rank), device=grad.device)
    return grad.new_zeros(shape).index_add_(1, index, grad)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left.T @ right`` to ``total``, in one GEMM if the dtypes allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right
