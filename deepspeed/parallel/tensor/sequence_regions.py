"""Megatron-style sequence parallelism: norms, dropouts and residuals on sequence shards between parallel regions.

(Korthikanti et al.: Reducing Activation Recomputation in Large Transformer Models, 2022.) Each rank has ``1/ranks`` of
the tokens there; a column-parallel layer all-gathers them and a row-parallel one reduce-scatters its sum, which moves
the same number of bytes as the all-reduce of plain tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.tensor.mappings import (
    gather_sequence,
    join_sequence,
    scatter_sequence,
    split_sequence,
)


@dataclass(slots=True)
class SequenceRegion:
    """Sharding of one sequence. Layers of a model share one object; ``enter`` starts a sequence.

    ``dim``: dim of tokens in the activations. ``length``: tokens of the whole sequence. If it does not divide, the last
    ranks' shards end in padding rows, whose results are dropped and have no gradient.
    """

    group: Communicator
    dim: int = 0
    length: int | None = None

    def enter(self, inputs: Tensor) -> Tensor:
        """Return this rank's shard of ``inputs`` [.., length, ..], equal on all ranks."""
        self.length = inputs.shape[self.dim]
        return split_sequence(inputs, self.group, self.dim)

    def gather(self, inputs: Tensor) -> Tensor:
        """All-gather the sequence, for work partitioned over the ranks."""
        return gather_sequence(inputs, self.group, self.dim, self._length(inputs))

    def scatter(self, inputs: Tensor) -> Tensor:
        """Reduce-scatter: return this rank's shard of the sum of all ranks' ``inputs`` [.., length, ..]."""
        self.length = inputs.shape[self.dim]
        return scatter_sequence(inputs, self.group, self.dim)

    def leave(self, inputs: Tensor) -> Tensor:
        """Gather the sequence, for work replicated on all ranks."""
        return join_sequence(inputs, self.group, self.dim, self._length(inputs))

    def _length(self, inputs: Tensor) -> int | None:
        """Return the length of the whole sequence; None if the shards have no padding."""
        most = inputs.shape[self.dim] * self.group.size
        return None if self.length is None or self.length == most else self.length
