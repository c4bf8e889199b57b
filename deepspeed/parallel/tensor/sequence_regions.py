"""Norms, dropouts and residuals on shards of the sequence, between the parallel regions of a block.

(Korthikanti et al.: Reducing Activation Recomputation in Large Transformer Models, 2022.) Each rank has ``1/ranks`` of
the tokens there; a column-parallel layer gathers them and a row-parallel one scatters its sum, which takes the same
bytes as the all-reduce of plain tensor parallelism.
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
    """The shards of one sequence: layers of a model share one object, ``enter`` begins a sequence.

    ``dim``: where the tokens are in the activations. ``length``: tokens of the whole sequence, which need not divide:
    the last ranks' shards end in rows of padding then, whose results are dropped and have no gradient.
    """

    group: Communicator
    dim: int = 0
    length: int | None = None

    def enter(self, inputs: Tensor) -> Tensor:
        """This rank's shard of ``inputs`` [.., length, ..], which are equal on all ranks."""
        self.length = inputs.shape[self.dim]
        return split_sequence(inputs, self.group, self.dim)

    def gather(self, inputs: Tensor) -> Tensor:
        """The whole sequence, for work of which each rank does a part."""
        return gather_sequence(inputs, self.group, self.dim, self._length(inputs))

    def scatter(self, inputs: Tensor) -> Tensor:
        """This rank's shard of the sum of all ranks' ``inputs`` [.., length, ..]."""
        self.length = inputs.shape[self.dim]
        return scatter_sequence(inputs, self.group, self.dim)

    def leave(self, inputs: Tensor) -> Tensor:
        """The whole sequence, for work that is the same on all ranks."""
        return join_sequence(inputs, self.group, self.dim, self._length(inputs))

    def _length(self, inputs: Tensor) -> int | None:
        """None: the shards have no padding."""
        most = inputs.shape[self.dim] * self.group.size
        return None if self.length is None or self.length == most else self.length
