"""Config of the ragged inference engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from deepspeed.config.section import DeepSpeedConfigModel, Int, key
from deepspeed.inference.config import DeepSpeedTPConfig as InitInferenceTPConfig
from deepspeed.inference.v2.ragged.manager_configs import DSStateManagerConfig


class DeepSpeedTPConfig(DeepSpeedConfigModel):
    """Tensor parallelism."""

    tp_size: Int = key(1, "Ranks that share each layer.", ge=1)


class RaggedQuantConfig(DeepSpeedConfigModel):
    """Quantized weights."""

    quantization_mode: Literal["wf6af16"] | None = key(None, "`wf6af16`: 6-bit weights, fp16 activations.")


QuantizationConfig = RaggedQuantConfig
"""The documented name."""


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
