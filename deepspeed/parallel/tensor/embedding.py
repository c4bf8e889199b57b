"""Vocabulary-parallel embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.base.sharded import full_shape
from deepspeed.comm.collectives import Communicator, communicator_of
from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.layers import TensorParallelLayer, check_ranks
from deepspeed.parallel.tensor.mappings import reduce_from_
from deepspeed.parallel.tensor.sequence_regions import SequenceRegion


class VocabParallelEmbedding(TensorParallelLayer):
    """Each rank looks up the tokens whose rows it holds, with zeros for others; the sum over ranks is exact.

    Replaces an ``nn.Embedding``, or a subclass whose forward treats every token alike (a scale).

    Args:
        module: with the whole weight [vocabulary, width].
        mp_group: the ranks that share it.
        weight: this rank's existing parameter, shared with another layer (tied embeddings).
        cut: of the vocabulary into consecutive runs (``dim`` is 0). By default as even as possible.
        sequence: reduce-scatter the output, so that each rank gets its shard of the sequence.

    Input [..] token ids, equal on all ranks; output [.., width].

    Raises:
        ValueError: ``max_norm`` or ``scale_grad_by_freq``, which need the whole matrix.
    """

    weight: nn.Parameter

    def __init__(
        self,
        module: nn.Embedding,
        mp_group: Communicator | ProcessGroup | None = None,
        *,
        cut: Cut | None = None,
        weight: nn.Parameter | None = None,
        sequence: SequenceRegion | None = None,
        name: str | None = None,
    ) -> None:
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise ValueError(
                "an embedding with max_norm or scale_grad_by_freq cannot be split along its vocabulary"
            )
        self._adopt(module)
        self.name = name
        self.group = communicator_of(mp_group, prepared=True)
        rows = full_shape(module.weight)[0]
        self.cut = cut or Cut.even(0, rows, self.group.size)
        check_ranks(self.cut, self.group, rows)
        if not self.cut.is_plain:
            raise ValueError("each rank holds one run of the vocabulary, in rank order")
        self.sequence = sequence
        extents, rank = self.cut.extents, self.group.rank
        self.first, self.last = sum(extents[:rank]), sum(extents[: rank + 1])
        self.num_embeddings = extents[rank]
        if self.padding_idx is not None:
            inside = self.first <= self.padding_idx < self.last
            self.padding_idx = self.padding_idx - self.first if inside else None
        if weight is None:
            self._keep(module, {"weight": self.cut})
        else:
            self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        if self.group.size == 1:
            return super().forward(input)
        inside = (input >= self.first) & (input < self.last)
        own = torch.where(inside, input - self.first, 0)
        if not self.num_embeddings:
            output = self.weight.new_zeros((*input.shape, self.weight.shape[1])) + self.weight.sum()
        else:
            output = super().forward(own)
        output = output.masked_fill(~inside.unsqueeze(-1), 0)
        return reduce_from_(output, self.group) if self.sequence is None else self.sequence.scatter(output)
