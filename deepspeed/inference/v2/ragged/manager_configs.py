"""State of the ragged engine per sequence: the key-value cache, and how many sequences and tokens fit."""

from __future__ import annotations

from enum import Enum

from pydantic import Field, PositiveInt, ValidationInfo, field_validator

from deepspeed.config.deepspeed_config import DtypeEnum
from deepspeed.config.section import DeepSpeedConfigModel


class KVCacheType(Enum):
    DENSE = "dense"
    LOCAL = "local"


class AllocationMode(Enum):
    """RESERVE: keep so many bytes free and take the rest; ALLOCATE: take so many blocks."""

    RESERVE = "reserve"
    ALLOCATE = "allocate"


class KVCacheConfig(DeepSpeedConfigModel):
    """One cache."""

    type: KVCacheType = Field(default=KVCacheType.DENSE, description="Kind of attention that it serves.")
    block_size: int = Field(default=128, ge=1, description="Tokens per block.")
    num_allocation_groups: PositiveInt = Field(default=1, description="Layers that are allocated together.")
    max_blocks_per_allocation_group: PositiveInt = Field(
        default=64, description="Blocks per sequence and group."
    )
    cache_shape: tuple[PositiveInt, PositiveInt, PositiveInt] = Field(
        description="(layers, heads, head size)."
    )
    cache_dtype: DtypeEnum = Field(default=DtypeEnum.fp16, description="Dtype of keys and values.")


class MemoryConfig(DeepSpeedConfigModel):
    """Memory for the caches."""

    mode: AllocationMode = Field(
        default=AllocationMode.RESERVE, description="`size` counts bytes kept free, or blocks taken."
    )
    size: PositiveInt = Field(
        default=1_000_000_000, description="Bytes kept free (reserve), or blocks (allocate)."
    )


class DSStateManagerConfig(DeepSpeedConfigModel):
    """Sequences and tokens in flight."""

    max_tracked_sequences: PositiveInt = Field(default=2048, description="Sequences tracked at one time.")
    max_ragged_batch_size: PositiveInt = Field(default=768, description="Tokens in one forward.")
    max_ragged_sequence_count: PositiveInt = Field(
        default=512,
        description="Sequences in one forward; at most `max_tracked_sequences` and `max_ragged_batch_size`.",
    )
    max_context: PositiveInt = Field(default=8192, description="Tokens of the longest sequence.")
    memory_config: MemoryConfig = Field(default=MemoryConfig(), description="Memory for the caches.")
    offload: bool = Field(default=False, description="Move idle caches to the host.")

    @field_validator("max_ragged_sequence_count")
    @classmethod
    def max_ragged_sequence_count_validator(cls, value: int, info: ValidationInfo) -> int:
        for name in ("max_tracked_sequences", "max_ragged_batch_size"):
            if value > info.data.get(name, value):
                raise ValueError(f"must not exceed {name} ({info.data[name]})")
        return value
