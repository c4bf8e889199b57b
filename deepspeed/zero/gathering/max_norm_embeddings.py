"""``Embedding(max_norm=...)`` at stage 3: rows clipped by a lookup stay clipped.

torch clips the norm of the rows it is about to look up in place, in the gathered table. The next gather would restore
the old rows, and each rank looks up different ones. So every rank records the rows it has looked up, and before the
update all ranks clip their union, in their shards and master weights: as one process would that sees every rank's
batch. Within the step each rank sees its looked-up rows clipped, since torch clips them again. A single rank clips its
shards immediately.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.sharded import full_shape
from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket


class MaxNormEmbeddings:
    """Tracks looked-up rows of the embeddings of ``module`` with a ``max_norm``. ``all_ranks``: all ranks of a step."""

    def __init__(self, module: nn.Module, all_ranks: Communicator) -> None:
        self.all_ranks = all_ranks
        self._tables: list[Any] = [
            each
            for each in module.modules()
            if isinstance(each, (nn.Embedding, nn.EmbeddingBag))
            and each.max_norm is not None
            and isinstance(getattr(each.weight, "ds_owner", None), ShardedBucket)
        ]
        self._seen: dict[nn.Module, Tensor] = {}
        self._handles = [self._watch(table) for table in self._tables]

    def _watch(self, table: Any) -> Any:
        def looked_up(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            ids = args[0] if args else kwargs["input"]
            if self.all_ranks.size == 1:
                self._write_clipped(table, ids)
            else:
                self._remember(table, ids)

        return table.register_forward_hook(untraced(looked_up), prepend=True, with_kwargs=True)

    def _remember(self, table: Any, ids: Tensor) -> None:
        seen = self._seen.get(table)
        if seen is None:
            rows = full_shape(table.weight)[0]
            seen = self._seen[table] = torch.zeros(rows, dtype=torch.int64, device=ids.device)
        seen[ids.detach().reshape(-1)] = 1

    @torch.no_grad()
    def _write_clipped(self, table: Any, ids: Tensor) -> None:
        param, rows = table.weight, ids.detach().reshape(-1).unique()
        whole = param.data.clone()
        kept = param.ds_owner.local_part(param.ds_position).view(param.data.shape)
        if not torch.equal(kept[rows.to(kept.device)], whole[rows].to(kept.device)):
            _write(param, whole)

    def settle(self) -> None:
        """Clip the rows that any rank has looked up since the last step. Collective."""
        if self._tables and self.all_ranks.size > 1:
            self._clip_seen()

    @torch.no_grad()
    def _clip_seen(self) -> None:
        for table in self._tables:
            param = table.weight
            rows = self._rows_of_all(table)
            owner: ShardedBucket = param.ds_owner
            if not rows.numel():
                continue
            owner.transitions.evict_stale(owner.layout.index)  # now sharded on every rank
            whole = torch.empty(full_shape(param), dtype=param.dtype, device=owner.device)
            owner.read_param(param.ds_position, whole)
            torch.embedding_renorm_(whole, rows, float(table.max_norm), float(table.norm_type))
            _write(param, whole)
        self._seen.clear()

    def _rows_of_all(self, table: Any) -> Tensor:
        device = table.weight.ds_owner.device
        seen = self._seen.get(table)
        if seen is None:
            seen = torch.zeros(full_shape(table.weight)[0], dtype=torch.int64, device=device)
        self.all_ranks.all_reduce_max(seen).wait()
        return seen.nonzero().view(-1)

    def destroy(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _write(param: Any, whole: Tensor) -> None:
    """Write to the shards, and to the changed elements of wider master weights; the others keep their bits."""
    access = getattr(param, "_ds_state_access", None)
    if access is not None:
        access.elements_written(param, whole)
    param.ds_owner.write_param(param.ds_position, whole)
