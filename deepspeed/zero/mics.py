"""MiCS (Z. Zhang et al. 2022): stage 3 within groups of ranks, replicas across them.

A gradient is reduce-scattered inside the group and its shard all-reduced over the replicas; parameters are gathered
inside the group only. With N ranks in groups of s, a gather moves (s-1)/s of a bucket from nearby ranks instead of
(N-1)/N from all ranks, at the price of N/s times the memory for model states.

``mics_hierarchical_params_gather`` is accepted and has no effect: gathers always run directly between the ranks of a
group.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.zero.gathering.init_context import Init, read_config
from deepspeed.zero.gathering.standalone_shard import shard_standalone
from deepspeed.zero.optimizer import DeepSpeedZeroOptimizer_Stage3
from deepspeed.zero.replica_groups import ReplicaGroup


class MiCS_Init(Init):
    """``zero.Init`` that shards parameters within groups of ``mics_shard_size`` ranks, a key the config must set.

    Every rank starts from the values of the first rank of ``data_parallel_group``. The arguments are those of
    ``zero.Init``.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        sequence_data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        settings = read_config(config_dict_or_path if config_dict_or_path is not None else config)
        self.shard_size = int(settings.get("zero_optimization", {}).get("mics_shard_size", -1))
        if enabled and self.shard_size <= 0:
            raise DeepSpeedConfigError(
                f"zero_optimization.mics_shard_size={self.shard_size}: MiCS_Init needs the number of ranks that share "
                "one copy of the parameters; set it in the config that is passed here, or use zero.Init."
            )
        super().__init__(
            module,
            data_parallel_group,
            mem_efficient_linear,
            remote_device,
            pin_memory,
            settings,
            enabled=enabled,
            dtype=dtype,
            mpu=mpu,
            sequence_data_parallel_group=sequence_data_parallel_group,
        )

    @cached_property
    def replica_group(self) -> ReplicaGroup:
        return ReplicaGroup.whole(self.communicator).mics(self.shard_size)

    def _shard_whole(self, param: nn.Parameter) -> None:
        shard_standalone(param, self.replica_group.shard, self.replica_group.all_ranks)

    def get_partition_rank(self) -> int:
        return self.replica_group.shard.rank

    @property
    def num_partitions(self) -> int:
        return self.replica_group.shard.size


class MiCS_Optimizer(DeepSpeedZeroOptimizer_Stage3):
    """Optimizer that the engine returns at stage 3 with ``mics_shard_size``."""
