"""Documented all-to-all between sequence shards and head shards with gradients, for attention that scripts write."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import Tensor

from deepspeed.parallel.sequence.assignment import shard_lengths
from deepspeed.parallel.sequence.exchange import Exchange, communicator_of, gather_lengths


class SeqAllToAll:
    """Called by ``apply``, as an autograd function."""

    @staticmethod
    def apply(
        group: Any,
        input: Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int = 0,
        stream: Any = None,
        handle: Any = None,
        type: str | None = None,
        is_fwd: bool = True,
    ) -> Tensor:
        """Scatter one dim over the ranks and gather another, as ``single_all_to_all`` does; differentiable. ``stream``,
        ``handle`` and ``type`` are accepted for compatibility: the result is complete when returned. Collective, also
        in backward."""
        comm = communicator_of(group)
        parts = shard_lengths(input.shape[scatter_idx], comm.size)
        ends = accumulate(parts)
        own = tuple(tuple(range(end - part, end)) for part, end in zip(parts, ends, strict=True))
        lengths = gather_lengths(input.shape[gather_idx], comm, input.device)
        return Exchange(comm, lengths, scatter_idx, gather_idx).to_heads((input,), (own,))[0]
