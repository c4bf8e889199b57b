"""The part of an engine that sums gradients of rows over ranks for a script: ``engine.sparse_sums``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepspeed.comm.sparse_tensor import SparseTensor
    from deepspeed.engine.interface import Engine


class SparseSums:
    """Sums of ``SparseTensor`` that a script keeps apart; the gradients of the module's parameters are summed by
    ``backward``. Every method is collective over ``dp_group``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def all_gather_scalar(self, value: Tensor, dp_group: Any) -> list[Tensor]:
        """``value`` of every rank of the group."""
        return _gathered(value, dp_group) if value.dim() else _gathered(value.unsqueeze(0), dp_group)

    def sparse_all_gather(self, value: Tensor, dp_group: Any) -> list[Tensor]:
        """The rows of every rank of the group, of which each may have another number."""
        return _gathered(value, dp_group)

    def sparse_allreduce(
        self, sparse: SparseTensor, dp_group: Any, dp_world_size: int | None = None
    ) -> SparseTensor:
        """Make ``sparse`` the mean over the group (the sum, without ``gradient_average``): the rows of all ranks, sent
        as ``communication_data_type``."""
        indices, values, _ = sparse.parts()
        ranks = dp_world_size or torch.distributed.get_world_size(group=dp_group)
        sent = values.to(self._engine.facts.communication_data_type) / (
            ranks if self._engine.facts.gradient_average else 1
        )
        sparse.indices = torch.cat(_gathered(indices, dp_group))
        sparse.values = torch.cat(_gathered(sent, dp_group)).to(values.dtype)
        return sparse

    def sparse_allreduce_bucket(
        self, bucket: Iterable[SparseTensor], dp_group: Any, dp_world_size: int | None = None
    ) -> list[SparseTensor]:
        return [self._engine.sparse_allreduce(sparse, dp_group, dp_world_size) for sparse in bucket]

    def sparse_allreduce_no_retain(
        self, bucket: Iterable[SparseTensor], dp_group: Any, dp_world_size: int | None = None
    ) -> None:
        """The same, written to the tensors, sparse or dense, that the ``SparseTensor`` were made of."""
        for sparse in self._engine.sparse_allreduce_bucket(bucket, dp_group, dp_world_size):
            original = sparse.orig_dense_tensor
            if original is not None and original.is_sparse:
                original.data = sparse.to_coo_tensor()
            elif original is not None:
                original.copy_(sparse.to_dense())


def _gathered(rows: Tensor, group: Any) -> list[Tensor]:
    from deepspeed.comm.sparse_tensor import gather_rows  # for scripts that sum rows by themselves

    return gather_rows(rows, group)
