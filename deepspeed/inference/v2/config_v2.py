"""Config of the ragged inference engine: tensor parallelism, quantization, and limits on the KV cache, sequences and
tokens."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator

from deepspeed.config.deepspeed_config import DtypeEnum
from deepspeed.config.section import DeepSpeedConfigModel, Int, key
from deepspeed.inference.config import DeepSpeedTPConfig as InitInferenceTPConfig


class DeepSpeedTPConfig(DeepSpeedConfigModel):
    """Tensor parallelism."""

    tp_size: Int = key(1, "Ranks that share each layer.", ge=1)


class RaggedQuantConfig(DeepSpeedConfigModel):
    """Quantized weights."""

    quantization_mode: Literal["wf6af16"] | None = key(None, "`wf6af16`: 6-bit weights, fp16 activations.")


QuantizationConfig = RaggedQuantConfig
"""The documented name."""


class KVCacheType(Enum):
    DENSE = "dense"
    LOCAL = "local"


class AllocationMode(Enum):
    """RESERVE: keep ``size`` bytes free and take the rest; ALLOCATE: take ``size`` blocks."""

    RESERVE = "reserve"
    ALLOCATE = "allocate"


class KVCacheConfig(DeepSpeedConfigModel):
    """One cache."""

    type: KVCacheType = key(KVCacheType.DENSE, "Attention type that the cache serves.")
    block_size: int = key(128, "Tokens per block.", ge=1)
    num_allocation_groups: PositiveInt = key(1, "Layers allocated together.")
    max_blocks_per_allocation_group: PositiveInt = key(64, "Blocks per sequence and group.")
    cache_shape: tuple[PositiveInt, PositiveInt, PositiveInt] = Field(
        description="(layers, heads, head size)."
    )
    cache_dtype: DtypeEnum = key(DtypeEnum.fp16, "Dtype of keys and values.")


class MemoryConfig(DeepSpeedConfigModel):
    """Memory for the caches."""

    mode: AllocationMode = key(AllocationMode.RESERVE, "`size`: bytes to keep free, or blocks to allocate.")
    size: PositiveInt = key(1_000_000_000, "Bytes kept free (reserve), or blocks (allocate).")


class DSStateManagerConfig(DeepSpeedConfigModel):
    """Sequences and tokens in flight."""

    max_tracked_sequences: PositiveInt = key(2048, "Maximum number of tracked sequences.")
    max_ragged_batch_size: PositiveInt = key(768, "Maximum number of tokens per forward.")
    max_ragged_sequence_count: PositiveInt = key(
        512,
        "Maximum number of sequences per forward; at most `max_tracked_sequences` and `max_ragged_batch_size`.",
    )
    max_context: PositiveInt = key(8192, "Maximum sequence length in tokens.")
    memory_config: MemoryConfig = key(MemoryConfig(), "Memory for the caches.")
    offload: bool = key(False, "Offload idle caches to the host.")

    @field_validator("max_ragged_sequence_count")
    @classmethod
    def max_ragged_sequence_count_validator(cls, value: int, info: ValidationInfo) -> int:
        for name in ("max_tracked_sequences", "max_ragged_batch_size"):
            if value > info.data.get(name, value):
                raise ValueError(f"must not exceed {name} ({info.data[name]})")
        return value


class RaggedInferenceEngineConfig(DeepSpeedConfigModel):
    """Arguments of the engine."""

    tensor_parallel: DeepSpeedTPConfig = key(DeepSpeedTPConfig(), "Tensor parallelism.", alias="tp")
    state_manager: DSStateManagerConfig = key(
        DSStateManagerConfig(), "Limits on sequences, tokens and caches.", alias="manager"
    )
    quantization: RaggedQuantConfig = key(RaggedQuantConfig(), "Quantized weights.")

    @field_validator("tensor_parallel", mode="before")
    @classmethod
    def of_init_inference(cls, value: Any) -> Any:
        """Accept ``init_inference``'s class of the same name, too."""
        return DeepSpeedTPConfig(tp_size=value.tp_size) if isinstance(value, InitInferenceTPConfig) else value
