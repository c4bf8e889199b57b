"""Documented interface of the fully pipelined distributed transformer (FPDT): long sequences in chunks.

J. Yao et al.: Training ultra long context language model with fully pipelined distributed Transformer, 2024. Attention
is in ``chunked.py``, chunk offload in ``chunks.py``; feed-forward layer and loss run in tiles
(``deepspeed.parallel.sequence.tiled``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.comm.collectives import communicator_of
from deepspeed.parallel.sequence.assignment import HeadAssignment
from deepspeed.parallel.sequence.chunked import (
    ChunkedAttentionCall,
    Rotary,
    chunked_self_attention,
    chunks_of,
)
from deepspeed.parallel.sequence.chunks import SequenceChunk as SequenceChunk
from deepspeed.parallel.sequence.exchange import gather_lengths, join_shards
from deepspeed.parallel.sequence.layer import apply_rotary_pos_emb as apply_rotary_pos_emb
from deepspeed.parallel.sequence.layer import apply_rotary_pos_emb_backward as apply_rotary_pos_emb_backward
from deepspeed.parallel.sequence.tiled.tiles import TiledCall, TiledFunction, run_tiles, tile_lengths
from deepspeed.transforms.recompute.side_stream import SideStream


class FPDT_InputConstruct(nn.Module):
    """One rank's part of a batch, arranged for chunk-by-chunk exchange.

    Each chunk of ``args.ds_sequence_parallel_fpdt_chunk_size`` tokens is sharded over all ranks; a rank holds its part
    of each chunk, concatenated. Lengths that chunks or ranks do not divide are split as evenly as possible.

    Args:
        tokens, labels, loss_mask, position_ids: [batch, sequence], or None.
        attention_mask: passed through.
        args: has ``ds_sequence_parallel_fpdt_chunk_size``.
        sp_size, sp_rank: size of the sequence-parallel group, and rank in it.
    """

    def __init__(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None,
        args: Any,
        sp_size: int,
        sp_rank: int,
    ) -> None:
        super().__init__()
        self.tokens, self.labels, self.loss_mask = tokens, labels, loss_mask
        self.attention_mask, self.position_ids = attention_mask, position_ids
        length = tokens.shape[1]
        chunks = _number_of_chunks(length, args.ds_sequence_parallel_fpdt_chunk_size)
        self.order = _order(chunks_of(length, chunks, sp_size), tokens.device)
        self.sp_rank = sp_rank

    def generate(self) -> tuple[Any, ...]:
        """Return this rank's tokens and labels, the loss mask, the attention mask, and this rank's position ids.

        The loss mask covers the whole sequence, [batch, sequence], in the order of the losses of `FPDT_LogitsLoss`:
        rank after rank.
        """
        own = self.order[self.sp_rank]
        everyone = torch.cat(self.order)
        return (
            _taken(self.tokens, own),
            _taken(self.labels, own),
            _taken(self.loss_mask, everyone),
            self.attention_mask,
            _taken(self.position_ids, own),
        )


class FPDT_Attention(nn.Module):
    """Causal self-attention with its two projections, in chunks of the sequence.

    Queries, keys and values are computed one chunk at a time; with offload they are in host memory between uses and
    prefetched one chunk ahead. Results equal plain attention, forward and backward. Each rank of the group holds a part
    of every chunk (`FPDT_InputConstruct`), and ranks exchange tokens for heads chunk by chunk. There must be at least
    as many query heads as ranks, and the number of key heads must divide that of query heads.

    Args:
        config: has ``num_attention_heads``, ``kv_channels`` (the head size), and optionally ``num_key_value_heads`` and
            ``attention_dropout``.
        first_weight: [(heads + 2 heads of keys) * head size, hidden]: the rows of queries, of keys, of values.
        first_bias: of that size, or None.
        second_weight: [hidden, heads * head size]; ``second_bias``: [hidden], or None.
        sequence_process_group: the ranks that share a sequence. None: one rank.
        gather_idx, scatter_idx: accepted for compatibility; tokens are dim 0.
        return_bias: return the second bias separately instead of adding it.
        chunk_size: tokens per chunk.
        enable_offloading: whether to offload chunks to host memory.

    Raises:
        ValueError: fewer heads than ranks; dropout of attention weights in training.
    """

    def __init__(
        self,
        config: Any,
        first_weight: Tensor,
        first_bias: Tensor | None,
        second_weight: Tensor,
        second_bias: Tensor | None,
        sequence_process_group: Any,
        gather_idx: int = 0,
        scatter_idx: int = 2,
        return_bias: bool = True,
        chunk_size: int = 65536,
        enable_offloading: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.spg = sequence_process_group
        self.gather_idx, self.scatter_idx = gather_idx, scatter_idx
        self.return_bias = return_bias
        self.chunk_size = int(chunk_size)
        self.enable_offloading = enable_offloading
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.heads)
        self.hidden_size_per_attention_head = int(config.kv_channels)
        self.dropout = float(getattr(config, "attention_dropout", 0.0) or 0.0)
        self.qkv_linear_weight, self.qkv_linear_bias = first_weight, first_bias
        self.qkv_dense_weight, self.qkv_dense_bias = second_weight, second_bias
        self._check()
        self._stream = SideStream()

    def forward(
        self,
        layernorm_output: Tensor,
        attention_mask: Any,
        inference_params: Any,
        rotary_pos_emb: Any,
        cpu_offloading: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Map [own tokens, batch, hidden] to the same shape, and the second bias if ``return_bias``, else None.

        Args:
            attention_mask: accepted for compatibility; attention is causal.
            inference_params: must be None.
            rotary_pos_emb: None; (cosines, sines), or angles, of all positions: [tokens, 1, 1, rotated size].
            cpu_offloading: False keeps chunks on the device.

        ValueError: ``inference_params`` is given, or the ranks' tokens are not the shares of ``FPDT_InputConstruct``.
        Collective.
        """
        if inference_params is not None:
            raise ValueError("FPDT_Attention is for training: it has no cache; inference_params must be None")
        if self.training and self.dropout:
            raise ValueError(
                f"attention_dropout={self.dropout}: chunked attention does not support attention dropout; "
                "set config.attention_dropout to 0 (--attention-dropout 0)"
            )
        call = ChunkedAttentionCall(
            comm=communicator_of(self.spg),
            chunks=self._chunks(layernorm_output),
            heads=self.heads,
            kv_heads=self.kv_heads,
            size=self.hidden_size_per_attention_head,
            scale=1 / math.sqrt(self.hidden_size_per_attention_head),
            rotary=_tables(rotary_pos_emb),
            offload=self.enable_offloading and cpu_offloading,
            stream=self._stream,
        )
        out = chunked_self_attention(
            call, layernorm_output, self.qkv_linear_weight, self.qkv_linear_bias, self.qkv_dense_weight
        )
        if self.return_bias:
            return out, self.qkv_dense_bias
        return (out if self.qkv_dense_bias is None else out + self.qkv_dense_bias), None

    def _check(self) -> None:
        ranks = communicator_of(self.spg).size
        width = HeadAssignment(self.heads, self.kv_heads, ranks).width
        if width < ranks:
            raise ValueError(
                f"FPDT_Attention: {self.heads} heads for {ranks} ranks that share a sequence; each rank "
                f"needs at least one head: use at most {width} ranks"
            )
        rows = (self.heads + 2 * self.kv_heads) * self.hidden_size_per_attention_head
        if self.qkv_linear_weight.shape[0] not in (rows, 0):  # 0: sharded by ZeRO
            raise ValueError(
                f"first_weight has {self.qkv_linear_weight.shape[0]} rows, but {self.heads} heads of queries and twice "
                f"{self.kv_heads} of keys and values of size {self.hidden_size_per_attention_head} need {rows}"
            )

    def _chunks(self, x: Tensor) -> list[tuple[int, ...]]:
        comm = communicator_of(self.spg)
        lengths = gather_lengths(x.shape[0], comm, x.device)
        return _shares(lengths, _number_of_chunks(sum(lengths), self.chunk_size), comm.size)


class FPDT_FFN(TiledFunction):
    """``FPDT_FFN.apply(x, w1, b1, w2, b2, add_bias, chunk_size)``: a chunked feed-forward layer with tanh GELU.

    ``x`` [tokens, batch, hidden], ``w1`` [wide, hidden], ``w2`` [hidden, wide], biases or None. Intermediate values
    exist for ``chunk_size`` tokens at a time, in forward and in backward. Returns the result, including ``b2`` if
    ``add_bias``, and the bias still to be added: ``b2`` if not ``add_bias``, else None.
    """

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        add_bias: bool,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor | None]:
        def compute(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
            inside = bias_gelu(nn.functional.linear(x, w1, b1))
            return nn.functional.linear(inside, w2, b2 if add_bias else None)

        out = _in_tiles(compute, [x], [w1, b1, w2, b2], _number_of_chunks(x.shape[0], chunk_size))
        return out, None if add_bias else b2


class FPDT_LogitsLoss(TiledFunction):
    """``FPDT_LogitsLoss.apply(lm_output, labels, logit_weights, rank, spg_size, spg, num_chunk)``: the loss of every
    token of the sequence, [batch, tokens of all ranks], fp32 (fp64 for fp64 inputs), in rank order.

    ``lm_output`` [own tokens, batch, hidden]; ``labels`` [batch, own tokens], the loss is 0 at -100; ``logit_weights``
    [vocabulary, hidden]; ``spg``: the ranks that share the sequence, or None (``rank`` and ``spg_size`` are ignored).
    Logits exist for one of ``num_chunk`` chunks of this rank's tokens at a time, in forward and in backward. Backward
    sums the incoming gradients over ranks, as in ``vocab_sequence_parallel_cross_entropy``. Collective.
    """

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        lm_output: Tensor,
        labels: Tensor,
        logit_weights: Tensor,
        rank: int,
        spg_size: int,
        spg: Any,
        num_chunk: int,
    ) -> Tensor:
        wide = torch.promote_types(lm_output.dtype, torch.float32)

        def compute(hidden: Tensor, target: Tensor, weights: Tensor) -> Tensor:
            logits = nn.functional.linear(hidden, weights).to(wide).flatten(0, 1)
            losses = nn.functional.cross_entropy(logits, target.flatten(), reduction="none")
            return losses.view(target.shape)

        own = _in_tiles(compute, [lm_output, labels.T], [logit_weights], num_chunk)
        return join_shards(own, communicator_of(spg), dim=0).T.contiguous()


def bias_gelu(x: Tensor) -> Tensor:
    """Compute GELU in its tanh approximation (D. Hendrycks, K. Gimpel, 2016)."""
    return nn.functional.gelu(x, approximate="tanh")


def _in_tiles(
    compute: Callable[..., Tensor], sharded: Sequence[Tensor], weights: Sequence[Tensor | None], tiles: int
) -> Tensor:
    """Compute ``compute(*sharded, *weights)`` in tiles along dim 0. Leaf weights are captured, and ``run_tiles``
    accumulates their gradients in fp32; weights with a graph are passed as inputs of every tile."""
    inputs = [each if each is not None and each.grad_fn is not None else None for each in weights]

    def one(tensors: list[Any]) -> Tensor:
        given = zip(tensors[len(sharded) :], weights, strict=True)
        return compute(
            *tensors[: len(sharded)], *(own if own is not None else weight for own, weight in given)
        )

    dims: list[int | None] = [0] * len(sharded) + [None] * len(weights)
    call = TiledCall(one, dims, tile_lengths(sharded[0].shape[0], tiles), join_dim=0)
    return run_tiles(call, [*sharded, *inputs])


def _shares(lengths: tuple[int, ...], chunks: int, ranks: int) -> list[tuple[int, ...]]:
    """Return the number of tokens of each rank in each chunk. ValueError: ``lengths`` do not match the chunks."""
    shares = chunks_of(sum(lengths), chunks, ranks)
    if lengths != tuple(map(sum, zip(*shares, strict=True))):
        raise ValueError(
            f"the ranks hold {lengths} tokens, which do not form {chunks} chunks: distribute sequences with "
            "FPDT_InputConstruct"
        )
    return shares


def _number_of_chunks(length: int, size: int) -> int:
    return max(1, math.ceil(length / size))


def _order(chunks: Sequence[tuple[int, ...]], device: torch.device) -> list[Tensor]:
    """Return the indices of the tokens that each rank holds."""
    parts: list[list[Tensor]] = [[] for _ in chunks[0]]
    start = 0
    for lengths in chunks:
        for rank, length in enumerate(lengths):
            parts[rank].append(torch.arange(start, start + length, device=device))
            start += length
    return [torch.cat(each) for each in parts]


def _taken(tensor: Tensor | None, order: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.index_select(1, order)


def _tables(rotary: Any) -> Rotary | None:
    if rotary is None:
        return None
    if isinstance(rotary, Tensor):
        return rotary.cos(), rotary.sin()
    cosines, sines = rotary
    return cosines, sines
