"""Ragged batching: sequences, their blocks, and batches of them."""

from deepspeed.inference.v2.ragged.blocked_allocator import BlockedAllocator
from deepspeed.inference.v2.ragged.kv_cache import BlockedKVCache, split_kv
from deepspeed.inference.v2.ragged.manager_configs import (
    AllocationMode,
    DSStateManagerConfig,
    KVCacheConfig,
    KVCacheType,
    MemoryConfig,
)
from deepspeed.inference.v2.ragged.ragged_manager import DSStateManager
from deepspeed.inference.v2.ragged.ragged_wrapper import RaggedBatchWrapper
from deepspeed.inference.v2.ragged.sequence_descriptor import (
    BaseSequenceDescriptor,
    DSSequenceDescriptor,
    PlaceholderSequenceDescriptor,
)

__all__ = [
    "AllocationMode",
    "BaseSequenceDescriptor",
    "BlockedAllocator",
    "BlockedKVCache",
    "DSSequenceDescriptor",
    "DSStateManager",
    "DSStateManagerConfig",
    "KVCacheConfig",
    "KVCacheType",
    "MemoryConfig",
    "PlaceholderSequenceDescriptor",
    "RaggedBatchWrapper",
    "split_kv",
]
