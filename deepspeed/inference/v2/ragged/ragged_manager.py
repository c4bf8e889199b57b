"""The sequences of an engine and their blocks, for code that is written against the documented classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import logger
from deepspeed.inference.v2.ragged.blocked_allocator import BlockedAllocator
from deepspeed.inference.v2.ragged.kv_cache import BlockedKVCache
from deepspeed.inference.v2.ragged.manager_configs import DSStateManagerConfig, KVCacheConfig
from deepspeed.inference.v2.ragged.sequence_descriptor import DSSequenceDescriptor
from deepspeed.inference.v2.scheduling_utils import SchedulingError, SchedulingResult


class DSStateManager:
    """
    Args:
        config: how many sequences, how long, and the memory for their caches.
        kv_configs: of each cache group.
        base_mp_group: ranks that get the same number of blocks.
    """

    def __init__(
        self,
        config: DSStateManagerConfig,
        kv_configs: Sequence[KVCacheConfig] | KVCacheConfig,
        base_mp_group: Any | None = None,
    ) -> None:
        self._config = config
        self._kv_configs = (kv_configs,) if isinstance(kv_configs, KVCacheConfig) else tuple(kv_configs)
        self._kv_cache = BlockedKVCache(
            self._kv_configs, config.memory_config, mp_group=base_mp_group, offload=config.offload
        )
        self._tracking_allocator = BlockedAllocator(config.max_tracked_sequences)
        shapes = [
            (config.max_tracked_sequences, kv.num_allocation_groups, kv.max_blocks_per_allocation_group)
            for kv in self._kv_configs
        ]
        device = get_accelerator().current_device_name()
        self._all_block_ids = tuple(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)
        self._all_block_ids_shadow = tuple(torch.zeros(shape, dtype=torch.int32) for shape in shapes)
        self._seqs: dict[int, DSSequenceDescriptor] = {}

    def get_cache(self, cache_id: int, cache_group: int = 0) -> Tensor:
        """[blocks, block size, 2, heads, head size]."""
        return self._kv_cache.get_cache(cache_id, cache_group)

    def get_sequence(self, uid: int) -> DSSequenceDescriptor | None:
        return self._seqs.get(uid)

    def get_or_create_sequence(self, uid: int) -> DSSequenceDescriptor:
        """SchedulingError: it is new, and as many as possible are tracked."""
        found = self._seqs.get(uid)
        if found is not None:
            return found
        if not self._tracking_allocator.free_blocks:
            raise SchedulingError(SchedulingResult.EngineSequenceLimitExceeded)
        place = int(self._tracking_allocator.allocate(1))
        made = DSSequenceDescriptor(
            place,
            tuple(ids[place] for ids in self._all_block_ids),
            tuple(ids[place] for ids in self._all_block_ids_shadow),
            max_context=self._config.max_context,
        )
        self._seqs[uid] = made
        return made

    def flush_sequence(self, uid: int) -> None:
        """Forget a sequence; its blocks are free. One that is not known is remarked on."""
        found = self._seqs.pop(uid, None)
        if found is None:
            logger.warning(f"sequence {uid} is not tracked: nothing to flush")
            return
        for group in range(self.n_kv_cache_groups):
            blocks = found.all_block_ids(group)
            if blocks.numel():
                self._kv_cache.free(blocks.tolist(), group)
        self._tracking_allocator.free(found.tracking_id)

    def allocate_blocks(self, n_blocks: int, cache_group: int = 0) -> Tensor:
        """int32 [n_blocks] on the host, for ``extend_kv_cache``. ValueError: there are not as many free."""
        return self._kv_cache.reserve(n_blocks, cache_group)

    @property
    def tracked_sequences(self) -> dict[int, DSSequenceDescriptor]:
        return self._seqs

    @property
    def n_tracked_sequences(self) -> int:
        return len(self._seqs)

    @property
    def kv_block_size(self) -> int:
        """Tokens of a block of the first cache group."""
        return self._kv_configs[0].block_size

    @property
    def n_kv_cache_groups(self) -> int:
        return self._kv_cache.num_caches

    @property
    def free_blocks(self) -> Tensor:
        """[cache groups]."""
        return self._kv_cache.free_blocks
