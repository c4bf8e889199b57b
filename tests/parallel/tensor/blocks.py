"""A block of a transformer in plain torch, and what makes its layers parallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from deepspeed.comm.collectives import Communicator, communicator_of
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.embedding import VocabParallelEmbedding
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from deepspeed.parallel.tensor.replicated import sum_gradients
from deepspeed.parallel.tensor.sequence_regions import SequenceRegion
from deepspeed.parallel.vocab_parallel import VocabularyPart, cross_entropy

WIDTH, HEAD, HIDDEN, VOCABULARY, LENGTH = 24, 4, 20, 37, 7
"""Vocabulary and length divide by no number of ranks."""


class Conv1D(nn.Module):
    """As Transformers': the weight is [inputs, outputs]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf) / 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight + self.bias


class Block(nn.Module):
    """Grouped-query attention with a fused projection of q, k, v (heads of each side by side), and a gated unit with a
    fused projection; biases everywhere. ``heads`` are this rank's (queries, keys)."""

    def __init__(self, queries: int, keys: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = queries, keys
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (queries + 2 * keys) * HEAD)
        self.out = nn.Linear(queries * HEAD, WIDTH)
        self.up = Conv1D(2 * HIDDEN, WIDTH)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.read: list[int] | None = None  # by own queries, which own key they read

    def attend(self, inputs: Tensor) -> Tensor:
        queries, keys = self.heads
        made = self.qkv(inputs).unflatten(-1, (-1, HEAD)).transpose(-2, -3)
        q, k, v = made.split([queries, keys, keys], dim=-3)
        read = self.read or [number * keys // queries for number in range(queries)]
        if not queries:
            mixed = q
        else:
            mixed = functional.scaled_dot_product_attention(
                q, k[..., read, :, :], v[..., read, :, :], is_causal=True
            )
        return self.out(mixed.transpose(-2, -3).flatten(-2))

    def feed(self, inputs: Tensor) -> Tensor:
        gate, value = self.up(inputs).chunk(2, -1)
        return self.down(torch.tanh(gate) * value)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attend(self.attention_norm(hidden)))
        return hidden + self.dropout(self.feed(self.norm(hidden)))


class Model(nn.Module):
    """Embedding, blocks, tied head, loss."""

    def __init__(
        self, queries: int = 6, keys: int = 2, blocks: int = 2, tied: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.keys = queries, keys
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(queries, keys, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for param in self.parameters():
            if param.dim() == 1:
                nn.init.normal_(param, 0.5, 0.3)
        self.sequence: SequenceRegion | None = None
        self.checkpoint: Any = None

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.sequence is not None:
            self.sequence.length = tokens.shape[1]
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden) if self.checkpoint is None else self.checkpoint(block, hidden)
        return self.loss(self.head(self.norm(hidden)), labels)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def tensor_parallel(ranks: int | None = None) -> ProcessMesh:
    return ProcessMesh.build(tp=ranks or dist.get_world_size())


def heads_by_rank(queries: int, keys: int, ranks: int) -> tuple[list[range], list[range]]:
    """Return the queries and keys of each rank: the keys are those that its queries read."""
    share = Cut.even(0, queries, ranks)
    own = [range(*rank[0]) if rank else range(0) for rank in share.parts]
    read = [sorted({q * keys // queries for q in qs}) for qs in own]
    return own, [range(each[0], each[-1] + 1) if each else range(0) for each in read]


def qkv_cut(queries: int, keys: int, ranks: int) -> Cut:
    own, read = heads_by_rank(queries, keys, ranks)
    parts = []
    for qs, ks in zip(own, read, strict=True):
        runs = [(qs, 0), (ks, queries), (ks, queries + keys)]
        parts.append(
            tuple(((first + run.start) * HEAD, (first + run.stop) * HEAD) for run, first in runs if len(run))
        )
    return Cut(0, (queries + 2 * keys) * HEAD, tuple(parts))


def split(
    model: Model, group: Communicator | ProcessGroup, *, by_sequence: bool = False, overlap: bool = False
) -> Model:
    """Make the layers of ``model`` parallel, in place."""
    group = communicator_of(group)
    sequence = SequenceRegion(group, 1) if by_sequence else None
    model.sequence = sequence
    rank, ranks = group.rank, group.size
    queries, keys = model.queries, model.keys
    own, read = heads_by_rank(queries, keys, ranks)
    qkv = qkv_cut(queries, keys, ranks)
    mixed = Cut.even(1, queries * HEAD, ranks, grain=HEAD)
    for block in model.blocks:
        block.heads = len(own[rank]), len(read[rank])
        block.read = [q * keys // queries - read[rank].start for q in own[rank]]
        block.qkv = LinearLayer(block.qkv, group, cut=qkv, sequence=sequence, overlap_comm=overlap)
        block.out = LinearAllreduce(block.out, group, cut=mixed, sequence=sequence)
        block.up = LinearLayer(
            block.up,
            group,
            cut=Cut.even(0, 2 * HIDDEN, ranks, blocks=2),
            sequence=sequence,
            overlap_comm=overlap,
        )
        block.down = LinearAllreduce(block.down, group, sequence=sequence)
        if sequence is not None:
            sum_gradients(block.attention_norm, group)
            sum_gradients(block.norm, group)
    tied = model.head.weight is model.embed.weight
    model.embed = VocabParallelEmbedding(model.embed, group, sequence=sequence)
    model.head = LinearLayer(
        model.head, group, weight=model.embed.weight if tied else None, sequence=sequence
    )
    if sequence is not None:
        sum_gradients(model.norm, group)
    part = VocabularyPart.of_cut(model.head.cut, group)
    model.loss = lambda logits, labels: cross_entropy(  # type: ignore[method-assign]
        logits, labels, part, label_smoothing=0.1, chunk_numel=64
    )
    return model


def batch(step: int = 0, replica: int = 0, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(VOCABULARY, (2, length), generator=generator)
    labels = torch.randint(VOCABULARY, (2, length), generator=generator)
    labels[0, 1] = -100
    return tokens, labels
