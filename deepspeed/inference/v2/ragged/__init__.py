"""Configuration of sequences and KV cache of the ragged engine."""

from deepspeed.inference.v2.ragged.manager_configs import (
    AllocationMode,
    DSStateManagerConfig,
    KVCacheConfig,
    KVCacheType,
    MemoryConfig,
)

__all__ = ["AllocationMode", "DSStateManagerConfig", "KVCacheConfig", "KVCacheType", "MemoryConfig"]
