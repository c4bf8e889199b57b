"""Ring attention: keys and values of a sharded sequence circulate over the ranks.

H. Liu, M. Zaharia, P. Abbeel: Ring Attention with blockwise Transformers for near-infinite context, 2023. Each rank
keeps its queries; in every step it attends to the part that it holds, while sending that part to the next rank.
Results are merged by log-sum-exp. In backward, keys and values circulate again together with their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.ops.attention_blocks import JoinedBlocks, kernel_for
from deepspeed.parallel.sequence.visibility import Visibility


@dataclass(frozen=True, eq=False)
class Ring:
    """A ring of ranks. ``parts``: number of tokens of each part of the sequence. The next part of the same heads is on
    the rank ``stride`` further in the group."""

    comm: Communicator
    parts: tuple[int, ...]
    stride: int

    @property
    def own(self) -> int:
        return self.comm.rank // self.stride

    def tokens(self, part: int) -> range:
        start = sum(self.parts[:part])
        return range(start, start + self.parts[part])

    def source(self, step: int) -> int:
        """Return the part that this rank holds in a step."""
        return (self.own - step) % len(self.parts)

    def send_next(self, tensors: list[Tensor], tokens: int) -> Callable[[], list[Tensor]]:
        """Send these tensors [batch, heads, tokens, size] to the next rank and receive those of the previous one, with
        ``tokens`` tokens. Returns a function that waits for and returns them. Collective over the group."""
        comm = self.comm
        outgoing = torch.cat([each.reshape(-1) for each in tensors])
        shapes = [(*each.shape[:2], tokens, each.shape[3]) for each in tensors]
        sizes = [math.prod(shape) for shape in shapes]
        incoming = outgoing.new_empty(sum(sizes))
        sent, received = [0] * comm.size, [0] * comm.size
        sent[(comm.rank + self.stride) % comm.size] = outgoing.numel()
        received[(comm.rank - self.stride) % comm.size] = incoming.numel()
        pending = comm.all_to_all(incoming, outgoing, received, sent)

        def wait() -> list[Tensor]:
            pending.wait()
            return [part.view(shape) for part, shape in zip(incoming.split(sizes), shapes, strict=True)]

        return wait


@untraced
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scale: float, ring: Ring
) -> Tensor:
    """Compute softmax attention of this rank's part of the sequence to the whole sequence.

    query [batch, heads, own tokens, size]; key and value likewise, with a number of heads that divides that of the
    query. ``visibility`` refers to positions in the whole sequence. Returns [batch, heads, own tokens, value size].
    Differentiable once. Collective over ``ring.comm``.
    """
    result: Tensor = _RingAttention.apply(query, key, value, visibility, scale, ring)  # pyright: ignore[reportAssignmentType]
    return result


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, scale: float, ring: Ring
    ) -> Tensor:
        joined = JoinedBlocks(query, value)
        rows, held = ring.tokens(ring.own), [key, value]
        for step in range(len(ring.parts)):
            columns = ring.tokens(ring.source(step))
            arriving = _send_next(ring, step, held)
            if not visibility.is_empty(rows, columns):
                mask = visibility.block(rows, columns, query.device)
                kernel = kernel_for(query, value, mask)
                joined.add(*kernel.forward(query, held[0], held[1], mask, scale))
            held = arriving() if arriving else held
        out, lse = joined.out.to(query.dtype), joined.lse
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.visibility, ctx.scale, ctx.ring = visibility, scale, ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        ring, visibility, grad = ctx.ring, ctx.visibility, grads[0].contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        dquery = torch.zeros(query.shape, dtype=wide, device=query.device)
        rows, held = ring.tokens(ring.own), [key, value]
        sums = [torch.zeros(each.shape, dtype=wide, device=each.device) for each in held]
        steps = len(ring.parts)
        for step in range(steps):
            columns = ring.tokens(ring.source(step))
            arriving = _send_next(ring, step, held)
            if not visibility.is_empty(rows, columns):
                mask = visibility.block(rows, columns, query.device)
                kernel = kernel_for(query, value, mask)
                dq, dk, dv = kernel.backward(grad, (query, held[0], held[1]), out, lse, mask, ctx.scale)
                dquery += dq
                sums[0] += dk
                sums[1] += dv
            if steps > 1:  # after the last step this returns the sums to their owner ranks
                sums = ring.send_next(sums, ring.parts[ring.source(step + 1)])()
            held = arriving() if arriving else held
        return dquery.to(query.dtype), sums[0].to(key.dtype), sums[1].to(value.dtype), None, None, None


def _send_next(ring: Ring, step: int, held: list[Tensor]) -> Callable[[], list[Tensor]] | None:
    """Start sending the current keys and values to the next rank; None in the last step."""
    if step + 1 == len(ring.parts):
        return None
    return ring.send_next(held, ring.parts[ring.source(step + 1)])
