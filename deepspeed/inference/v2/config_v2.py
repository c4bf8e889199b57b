"""Config of the ragged inference engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from deepspeed.config.section import DeepSpeedConfigModel, Int
from deepspeed.inference.config import DeepSpeedTPConfig as InitInferenceTPConfig
from deepspeed.inference.v2.ragged.manager_configs import DSStateManagerConfig


class DeepSpeedTPConfig(DeepSpeedConfigModel):
    """Tensor parallelism."""

    tp_size: Int = Field(default=1, ge=1, description="Ranks that share each layer.")


class RaggedQuantConfig(DeepSpeedConfigModel):
    """Quantized weights."""

    quantization_mode: Literal["wf6af16"] | None = Field(
        default=None, description="`wf6af16`: 6-bit weights, fp16 activations."
    )


QuantizationConfig = RaggedQuantConfig
"""The documented name."""


class RaggedInferenceEngineConfig(DeepSpeedConfigModel):
    """Arguments of the engine."""

    tensor_parallel: DeepSpeedTPConfig = Field(
        default=DeepSpeedTPConfig(), alias="tp", description="Tensor parallelism."
    )
    state_manager: DSStateManagerConfig = Field(
        default=DSStateManagerConfig(), alias="manager", description="Sequences, tokens and caches."
    )
    quantization: RaggedQuantConfig = Field(default=RaggedQuantConfig(), description="Quantized weights.")

    @field_validator("tensor_parallel", mode="before")
    @classmethod
    def of_init_inference(cls, value: Any) -> Any:
        """The class of the same name that ``init_inference`` takes says it as well."""
        return DeepSpeedTPConfig(tp_size=value.tp_size) if isinstance(value, InitInferenceTPConfig) else value
