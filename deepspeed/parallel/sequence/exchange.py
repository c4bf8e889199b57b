"""The two all-to-alls around attention: from sequence shards to head shards, and back.

S. A. Jacobs et al.: DeepSpeed Ulysses: System optimizations for enabling training of extreme long sequence Transformer
models, 2023. Heads need not divide evenly, sequence shards may have different lengths, and a head may go to several
ranks (shared keys and values): backward sums its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.tensor.mappings import mapped

Heads = tuple[tuple[int, ...], ...]
"""Heads that each rank of a group computes; () for ranks that compute none for this shard."""


@untraced
def gather_lengths(length: int, comm: Communicator, device: torch.device) -> tuple[int, ...]:
    """Gather ``length`` of every rank. Collective."""
    if comm.size == 1:
        return (length,)
    mine = torch.tensor([length], dtype=torch.int64, device=device)
    everyone = torch.empty(comm.size, dtype=torch.int64, device=device)
    comm.all_gather(everyone, mine).wait()
    return tuple(everyone.tolist())


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """HeadExchange between sequence shards [.., all heads, .., own tokens, ..] and head shards [.., own heads, .., all
    tokens, ..].

    ``lengths``: tokens of each rank's shard; 0 for ranks that send nothing to this one. ``heads_dim`` and
    ``tokens_dim`` name the two dims; the others are arbitrary.
    """

    comm: Communicator
    lengths: tuple[int, ...]
    heads_dim: int = 1
    tokens_dim: int = 2

    @untraced
    def to_heads(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> tuple[Tensor, ...]:
        """Return this rank's heads of all tokens, for several tensors in one all-to-all; differentiable."""
        result: tuple[Tensor, ...] = _Exchanged.apply(self, tuple(heads), True, *tensors)  # pyright: ignore[reportAssignmentType]
        return result

    @untraced
    def to_tokens(self, tensor: Tensor, heads: Heads) -> Tensor:
        """Return all heads of this rank's tokens, each head from one rank; differentiable."""
        result: tuple[Tensor] = _Exchanged.apply(self, (heads,), False, tensor)  # pyright: ignore[reportAssignmentType]
        return result[0]

    def spread(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> tuple[Tensor, ...]:
        """Do ``to_heads`` outside autograd."""
        sent = [
            [_pick(tensor, self.heads_dim, each[to]) for tensor, each in zip(tensors, heads, strict=True)]
            for to in range(self.comm.size)
        ]
        received = self._swap(
            sent,
            [
                [
                    self.shape(tensor, len(each[self.comm.rank]), length)
                    for tensor, each in zip(tensors, heads, strict=True)
                ]
                for length in self.lengths
            ],
        )
        return tuple(_joined(shards, self.tokens_dim) for shards in zip(*received, strict=True))

    def collect(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> tuple[Tensor, ...]:
        """Apply the adjoint of ``spread``: heads sent to several ranks are summed."""
        cuts = [tensor.split(self.lengths, self.tokens_dim) for tensor in tensors]
        own = self.lengths[self.comm.rank]
        received = self._swap(
            [[cut[to] for cut in cuts] for to in range(self.comm.size)],
            [
                [
                    self.shape(tensor, len(each[source]), own)
                    for tensor, each in zip(tensors, heads, strict=True)
                ]
                for source in range(self.comm.size)
            ],
        )
        return tuple(
            _assembled(shards, each, self.heads_dim)
            for shards, each in zip(zip(*received, strict=True), heads, strict=True)
        )

    def shape(self, like: Tensor, heads: int, tokens: int) -> list[int]:
        """Return the shape of ``like`` with other sizes of the two dims."""
        shape = list(like.shape)
        shape[self.heads_dim], shape[self.tokens_dim] = heads, tokens
        return shape

    def _swap(self, sent: list[list[Tensor]], shapes: list[list[list[int]]]) -> list[list[Tensor]]:
        """Run one all-to-all: send ``sent[rank]`` to each rank, receive tensors of ``shapes[rank]`` from it."""
        if self.comm.size == 1:
            return sent
        first = sent[0][0]
        outgoing = _flat(sent, first)
        counts = [[math.prod(shape) for shape in run] for run in shapes]
        incoming = first.new_empty(sum(map(sum, counts)))
        sent_counts = [sum(each.numel() for each in run) for run in sent]
        self.comm.all_to_all(incoming, outgoing, [sum(run) for run in counts], sent_counts).wait()
        pieces = iter(incoming.split([count for run in counts for count in run]))
        return [[next(pieces).view(shape) for shape in run] for run in shapes]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: HeadExchange, heads: tuple[Heads, ...], to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.heads = heads
        ctx.back = exchange.collect if to_heads else exchange.spread
        return (exchange.spread if to_heads else exchange.collect)(tensors, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.back(grads, ctx.heads)


@untraced
def join_shards(own: Tensor, comm: Communicator, *, dim: int, lengths: Sequence[int] | None = None) -> Tensor:
    """Concatenate all ranks' shards along ``dim``; backward sums each shard's gradient over ranks. ``lengths``: of the
    shards; None: they are exchanged. Collective, also in backward."""
    lengths = gather_lengths(own.shape[dim], comm, own.device) if lengths is None else lengths
    lengths = tuple(lengths)

    def gathered(own: Tensor) -> Tensor:
        if comm.size == 1:
            return own.clone()
        shape = list(own.shape)
        shape[dim] = max(lengths)
        padded = own.new_zeros(shape)
        padded.narrow(dim, 0, own.shape[dim]).copy_(own)
        everyone = own.new_empty(comm.size, *shape)
        comm.all_gather(everyone, padded).wait()
        shards = zip(everyone, lengths, strict=True)
        return torch.cat([shard.narrow(dim, 0, length) for shard, length in shards], dim)

    def own_sum(grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total).wait()
        return total.split(lengths, dim)[comm.rank]

    return mapped(own, gathered, own_sum)


def _pick(tensor: Tensor, dim: int, indices: tuple[int, ...]) -> Tensor:
    start = indices[0] if indices else 0
    if indices == tuple(range(start, start + len(indices))):
        return tensor.narrow(dim, start, len(indices))
    return tensor.index_select(dim, torch.tensor(indices, device=tensor.device))


def _flat(runs: list[list[Tensor]], like: Tensor) -> Tensor:
    """Concatenate all tensors, flattened, with a single copy."""
    result = like.new_empty(sum(each.numel() for run in runs for each in run))
    at = 0
    for run in runs:
        for each in run:
            result[at : at + each.numel()].view(each.shape).copy_(each)
            at += each.numel()
    return result


def _joined(shards: Sequence[Tensor], dim: int) -> Tensor:
    wanted = [shard for shard in shards if shard.shape[dim]] or list(shards[:1])
    return torch.cat(wanted, dim) if len(wanted) > 1 else wanted[0].contiguous()


def _assembled(shards: Sequence[Tensor], heads: Heads, dim: int) -> Tensor:
    """Assemble the heads by index; heads computed by several ranks are summed in rank order."""
    order = [head for each in heads for head in each]
    present = [shard for shard, each in zip(shards, heads, strict=True) if each]
    if order == list(range(len(order))):
        return torch.cat(present, dim) if len(present) > 1 else present[0].contiguous()
    shape = list(shards[0].shape)
    shape[dim] = max(order) + 1
    result = shards[0].new_zeros(shape)
    for shard, each in zip(shards, heads, strict=True):
        if each:
            result.index_add_(dim, torch.tensor(each, device=shard.device), shard)
    return result
