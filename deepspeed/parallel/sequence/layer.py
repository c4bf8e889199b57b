"""DeepSpeed Ulysses in its classic form: a wrapper around any attention over whole sequences.

S. A. Jacobs et al.: DeepSpeed Ulysses: System optimizations for enabling training of extreme long sequence Transformer
models, 2023.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import communicator_of
from deepspeed.parallel.sequence.assignment import HeadAssignment, shard_lengths
from deepspeed.parallel.sequence.exchange import HeadExchange, gather_lengths


class DistributedAttention(Module):
    """Attention over sequences sharded across a group, computed by a module for whole sequences.

    Two all-to-alls surround ``local_attention``, which sees all tokens and this rank's heads. Heads need not divide
    evenly, there may be fewer key/value heads than ranks (they are sent to each rank that uses them), and shards may
    have different lengths.

    Args:
        local_attention: ``local_attention(query, key, value, *args, **kwargs)`` -> tensor of the query's layout; its
            heads and head size may be fused into one dim.
        sequence_process_group: the ranks that share a sequence, in its order. None: one rank.
        scatter_idx: the dim of heads.
        gather_idx: the dim of tokens.
        sp_stream: accepted for compatibility.
        num_kv_heads: accepted for compatibility; the number of key heads is taken from each call's key.
    """

    def __init__(
        self,
        local_attention: Module,
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.local_attn = local_attention
        self.sp_stream, self.sp_overlap_comm = sp_stream, sp_stream is not None
        self.num_kv_heads = num_kv_heads
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx
        self.sequence_lengths: tuple[int, ...] | None = None
        """Lengths of all ranks' shards, if the caller knows them; otherwise every forward exchanges them (one integer
        per rank, which synchronizes with a device)."""

    def layer_sync(self, layer: Any) -> None:
        """Do nothing; kept for compatibility. Results are complete when returned."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention output of all heads for this rank's tokens.

        Args:
            query: [own tokens, batch, heads, head size] or [batch, own tokens, heads, head size], according to
                ``scatter_idx`` and ``gather_idx``.
            key, value: likewise; their number of heads divides that of the query.
            batch_dim_idx: the dim of the batch; accepted for compatibility.
            rotary_pos_emb: (cosines, sines) of all positions, [tokens, 1, 1, rotated size], to be applied to query
                and key.
            args, kwargs: passed to the local attention.

        Raises:
            ValueError: there are fewer heads than ranks (``local_attention`` needs whole sequences, unlike
                ``UlyssesSPAttentionHF``, the attention of Transformers models).
        """
        comm = communicator_of(self.spg)
        heads_dim, tokens_dim = self.scatter_idx, self.gather_idx
        plan = HeadAssignment(query.shape[heads_dim], key.shape[heads_dim], comm.size)
        self._check(plan)
        lengths = self.sequence_lengths or gather_lengths(query.shape[tokens_dim], comm, query.device)
        exchange = HeadExchange(comm, lengths, heads_dim, tokens_dim)
        keys = plan.keys(comm.rank)
        query, key, value = exchange.to_heads((query, key, value), (plan.queries(comm.rank), keys, keys))
        if plan.group_of(comm.rank) is None:  # the local attention supports only uniform head groups
            index = torch.tensor(plan.key_of_query(comm.rank), device=key.device)
            key, value = key.index_select(heads_dim, index), value.index_select(heads_dim, index)
        if rotary_pos_emb is not None:
            cosines, sines = (self._like_tokens(each) for each in rotary_pos_emb)
            query = apply_rotary_pos_emb(query, cosines, sines)
            key = apply_rotary_pos_emb(key, cosines, sines)
        context = self.local_attn(query, key, value, *args, **kwargs)
        return self._back(context, exchange, plan)

    def _check(self, plan: HeadAssignment) -> None:
        if plan.head_groups > 1:
            raise ValueError(
                f"DistributedAttention: {plan.heads} heads for {plan.ranks} ranks that share a sequence. "
                "The local attention sees full sequences, so each rank needs at least one head: use at most "
                f"sequence_parallel_size={plan.width}, or UlyssesSPAttentionHF"
            )

    def _like_tokens(self, table: Tensor) -> Tensor:
        """Move the tokens of a table [tokens, 1, 1, size] to the query's dim of tokens."""
        return table.transpose(0, self.gather_idx) if self.gather_idx else table

    def _back(self, context: Tensor, exchange: HeadExchange, plan: HeadAssignment) -> Tensor:
        own = len(plan.queries_of(exchange.comm.rank))
        fused, dim = context.shape[self.scatter_idx] != own, self.scatter_idx
        if fused:
            context = context.unflatten(dim, (own, -1))
        result = exchange.to_tokens(context, plan.queries(exchange.comm.rank))
        return result.flatten(dim, dim + 1) if fused else result


def apply_rotary_pos_emb(t: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Apply rotary embedding to the first ``freqs_cos.shape[-1]`` elements of each head, pairing the two halves
    (RoFormer, J. Su et al. 2021); the rest is unchanged. The tables broadcast to ``t``."""
    size = freqs_cos.shape[-1]
    turned, rest = t[..., :size], t[..., size:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * freqs_cos + torch.cat((-second, first), dim=-1) * freqs_sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def apply_rotary_pos_emb_backward(grad_output: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Compute the gradient of ``t`` in `apply_rotary_pos_emb` from that of the result."""
    size = freqs_cos.shape[-1]
    turned, rest = grad_output[..., :size], grad_output[..., size:]
    first, second = (turned * freqs_sin).chunk(2, dim=-1)
    turned = turned * freqs_cos + torch.cat((second, -first), dim=-1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@untraced
def single_all_to_all(
    input: Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: Any,
    async_op: bool = False,
    handle: dict[str, Any] | None = None,
    type: str | None = None,
    num_kv_heads: int | None = None,
) -> Tensor:
    """Scatter one dim over the ranks and gather another, outside autograd.

    Sizes that the number of ranks does not divide are split with larger parts first; heads (``scatter_idx`` > 1) in
    multiples of ``num_kv_heads`` equal groups, if given. Gathered parts may differ in size. With ``async_op``, wait for
    ``handle[type + "_work"]``; ``handle[type + "_post_all2all_func"](handle[type + "_grad"])`` is then the result.

    ValueError: ``async_op`` without ``handle`` and ``type``.
    """
    comm = communicator_of(group)
    units = num_kv_heads if num_kv_heads and scatter_idx > 1 else input.shape[scatter_idx]
    if input.shape[scatter_idx] % max(units, 1):
        raise ValueError(
            f"num_kv_heads={units} does not divide the {input.shape[scatter_idx]} heads of the input"
        )
    width = input.shape[scatter_idx] // max(units, 1)
    parts = [count * width for count in shard_lengths(units, comm.size)]
    joined = gather_lengths(input.shape[gather_idx], comm, input.device)
    outgoing = torch.cat([part.reshape(-1) for part in input.split(parts, scatter_idx)])
    exchange = HeadExchange(comm, joined, scatter_idx, gather_idx)
    shapes = [exchange.shape(input, parts[comm.rank], length) for length in joined]
    received = [torch.Size(shape).numel() for shape in shapes]
    sent = [outgoing.numel() // max(1, sum(parts)) * part for part in parts]
    incoming = outgoing.new_empty(sum(received))
    work = comm.all_to_all(incoming, outgoing, received, sent)

    def finish(buffer: Tensor) -> Tensor:
        pieces = buffer.split(received)
        return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], gather_idx)

    if not async_op:
        work.wait()
        return finish(incoming)
    if handle is None or type is None:
        raise ValueError("single_all_to_all: async_op needs handle, a dict, and type, the prefix of its keys")
    handle |= {f"{type}_work": work, f"{type}_grad": incoming, f"{type}_post_all2all_func": finish}
    return incoming


class _SeqAllToAll:
    """`single_all_to_all` with gradients, under its documented name, for attention layers of scripts."""

    @staticmethod
    def apply(group: Any, input: Tensor, scatter_idx: int, gather_idx: int, *unused: Any) -> Tensor:
        """Scatter one dim over the ranks and gather another; backward does the reverse, exactly: it returns gradients
        to the ranks that the parts came from, of whatever size. The dim of the batch and the stream, handle and type of
        overlapped communication are accepted: the result is complete when returned. Collective, also in backward."""
        comm = communicator_of(group)
        ends = list(accumulate(shard_lengths(input.shape[scatter_idx], comm.size), initial=0))
        parts = tuple(tuple(range(*ends[rank : rank + 2])) for rank in range(comm.size))
        lengths = gather_lengths(input.shape[gather_idx], comm, input.device)
        return HeadExchange(comm, lengths, scatter_idx, gather_idx).to_heads((input,), (parts,))[0]
