"""Which ranks share one copy of the model states, and which hold the same slice.

Plain ZeRO shards one copy across all data-parallel ranks. MiCS (Z. Zhang et al.: MiCS: Near-linear scaling for training
gigantic model on public cloud, VLDB 2022) shards it across runs of ``mics_shard_size`` neighbouring ranks, so that
parameters are gathered within a run (one node, a fast link), and every run holds a replica.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.comm.collectives import Communicator, communicator
from deepspeed.comm.groups import new_group
from deepspeed.comm.mesh import split_ranks
from deepspeed.runtime.config_problems import DeepSpeedConfigError


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """``everyone`` = the data-parallel ranks = ``shard`` x ``replicas``: this rank's slice is one of ``shard.size``,
    and ``replicas.size`` ranks hold the same."""

    everyone: Communicator
    shard: Communicator
    replicas: Communicator

    @property
    def first_replica(self) -> bool:
        """Whether this rank's copy counts where each slice must count once (norms)."""
        return self.replicas.rank == 0

    @classmethod
    def whole(cls, everyone: Communicator) -> ShardGroups:
        """Plain ZeRO: one copy."""
        return cls(everyone, everyone, Communicator(None))

    @classmethod
    def mics(cls, everyone: Communicator, shard_size: int) -> ShardGroups:
        """One copy per ``shard_size`` ranks. Collective."""
        if everyone.size % shard_size:
            raise DeepSpeedConfigError(
                f"zero_optimization.mics_shard_size={shard_size} must divide the number of data-parallel ranks, "
                f"{everyone.size}"
            )
        if shard_size == everyone.size:
            return cls.whole(everyone)
        me = everyone.ranks[everyone.rank]
        inner = split_ranks(everyone.ranks, me, shard_size, inner=True)
        across = split_ranks(everyone.ranks, me, shard_size, inner=False)
        return cls(everyone, _communicator(inner), _communicator(across))


def _communicator(ranks: tuple[int, ...]) -> Communicator:
    return communicator(new_group(ranks)) if len(ranks) > 1 else Communicator(None)
