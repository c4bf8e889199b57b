"""``SparseTensor``: the non-zero rows of a matrix, such as the gradient of an embedding."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gather ``rows`` [n, ...] of every rank of ``group``, where n may differ between ranks. Collective."""
    counts = [rows.new_empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, rows.new_tensor([len(rows)], dtype=torch.int64), group=group)
    lengths = [int(count) for count in counts]
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    every = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(every, padded, group=group)
    return [part[:length] for part, length in zip(every, lengths, strict=True)]


class SparseTensor:
    """The rows of ``dense_tensor`` [rows, columns] with a non-zero element, or the rows of a torch sparse tensor.

    ``indices`` [n] are the row numbers, ``values`` [n, columns] the rows, ``dense_size`` the dense shape. After
    ``add`` rows may be duplicated; ``to_dense`` sums them.
    """

    def __init__(self, dense_tensor: Tensor | None = None) -> None:
        self.orig_dense_tensor = dense_tensor
        self.indices: Tensor | None = None
        self.values: Tensor | None = None
        self.dense_size: list[int] | None = None
        if dense_tensor is None:
            return
        if dense_tensor.is_sparse:
            whole = dense_tensor.coalesce()
            self.indices, self.values = whole.indices().flatten(), whole.values()
        else:
            self.indices = dense_tensor.ne(0).flatten(1).any(dim=1).nonzero().flatten()
            self.values = dense_tensor[self.indices]
        self.dense_size = list(dense_tensor.size())

    @staticmethod
    def type() -> str:
        return "deepspeed.SparseTensor"

    @property
    def dtype(self) -> torch.dtype:
        return self.parts()[1].dtype

    def parts(self) -> tuple[Tensor, Tensor, list[int]]:
        if self.indices is None or self.values is None or self.dense_size is None:
            raise ValueError("the SparseTensor is empty: it was created without a tensor")
        return self.indices, self.values, self.dense_size

    def to_coo_tensor(self) -> Tensor:
        indices, values, size = self.parts()
        return torch.sparse_coo_tensor(indices.unsqueeze(0), values, size)

    def to_dense(self) -> Tensor:
        indices, values, size = self.parts()
        return values.new_zeros(size).index_add_(0, indices, values)

    def sparse_size(self) -> tuple[int, int]:
        """Return the numbers of stored elements (indices included) and of dense elements."""
        indices, values, size = self.parts()
        return indices.numel() + values.numel(), torch.Size(size).numel()

    def add(self, b: SparseTensor) -> None:
        """Add the rows of ``b``, which has the same dense shape, in place."""
        indices, values, size = self.parts()
        others, rows, other_size = b.parts()
        if size != other_size:
            raise ValueError(f"a SparseTensor of shape {other_size} cannot be added to one of shape {size}")
        self.indices = torch.cat([indices, others])
        self.values = torch.cat([values, rows])

    def __str__(self) -> str:
        kept, whole = self.sparse_size()
        return f"{self.type()}(shape={self.parts()[2]}, kept={kept}, dense={whole})"

    __repr__ = __str__
