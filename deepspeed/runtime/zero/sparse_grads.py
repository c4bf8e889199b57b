"""``sparse_gradients``: only the rows of an embedding's gradient that a rank touched are communicated.

A sibling of ``GradBucket`` for one [rows, width] parameter. The ranks tell each other how many rows they touched; if
it is cheaper than the dense sum, they exchange (row number, row) pairs, padded to the largest count, and each rank
adds them up in rank order. The result is dense.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.comm.collectives import Pending
from deepspeed.runtime.zero.grad_sinks import GradBucket, InFlight


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Weights of the embeddings in ``module`` that are used by nothing else (a tied head has a dense gradient)."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for owner in module.modules():
        for param in owner.parameters(recurse=False):
            owners.setdefault(param, []).append(owner)
    return {
        p for p, found in owners.items() if all(isinstance(o, (nn.Embedding, nn.EmbeddingBag)) for o in found)
    }


class SparseGradBucket(GradBucket):
    """Gradient of one embedding, summed over ranks by rows."""

    def __init__(self, *args: Any, shape: torch.Size, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows, self.width = shape

    def launch(self, pre: float, post: float) -> None:
        table = self._local_table()
        touched = (
            table.ne(0).any(dim=1).nonzero().view(-1)
            if table is not None
            else torch.empty(0, dtype=torch.int64)
        )
        counts = torch.empty(self.communicator.size, dtype=torch.int64, device=self.device)
        self.communicator.all_gather(counts, torch.tensor([touched.numel()], device=self.device)).wait()
        most = int(counts.max())
        if self.communicator.size == 1 or most * self.communicator.size >= self.rows:
            super().launch(pre, post)
            return
        if self.local is None:
            self._open()
        assert self.local is not None
        self.in_flight = self._exchange(touched, counts.tolist(), most, pre, post)

    def _local_table(self) -> Tensor | None:
        return (
            self.views[0].view(self.rows, self.width) if self.local is not None and self.written[0] else None
        )

    def _exchange(self, touched: Tensor, counts: list[int], most: int, pre: float, post: float) -> InFlight:
        size, wire_dtype = self.communicator.size, self.layout.wire_dtype
        assert self.local is not None
        table = self.views[0].view(self.rows, self.width)
        rows = torch.zeros(most, dtype=torch.int64, device=self.device)
        values = torch.zeros(most, self.width, dtype=wire_dtype, device=self.device)
        rows[: touched.numel()] = touched
        if touched.numel():
            values[: touched.numel()] = table[touched]
        all_rows = torch.empty(size * most, dtype=torch.int64, device=self.device)
        all_values = torch.empty(size * most * self.width, dtype=wire_dtype, device=self.device)
        pendings = (
            self.communicator.all_gather(all_rows, rows),
            self.communicator.all_gather(all_values, values.mul_(pre).view(-1)),
        )

        def add_up() -> None:
            for pending in pendings:
                pending.wait()
            self.views[0].zero_()
            received = all_values.view(size, most, self.width)
            for rank, count in enumerate(counts):
                chosen = all_rows[rank * most : rank * most + count]
                table.index_add_(0, chosen, received[rank, :count].to(table.dtype))
            table.mul_(post)

        out = self.local[self.start : self.stop]
        return InFlight(Pending(add_up), out, self.local, True)
