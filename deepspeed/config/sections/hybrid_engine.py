"""The `hybrid_engine` section."""

from __future__ import annotations

from pydantic import Field

from deepspeed.config.section import DeepSpeedConfigModel, Int


class HybridEngineConfig(DeepSpeedConfigModel):
    """One engine that trains and generates (RLHF)."""

    enabled: bool = Field(default=False, description="`initialize` returns the hybrid engine.")
    max_out_tokens: Int = Field(default=512, ge=1, description="Longest sequence in generation.")
    inference_tp_size: Int = Field(
        default=1, ge=1, description="Ranks that share each layer while generating."
    )
    release_inference_cache: bool = Field(
        default=False,
        description="Give the memory of the key-value cache back to the device after each `generate`.",
    )
    pin_parameters: bool = Field(
        default=True,
        description="Keep the memory of split weights between two calls of `generate` (`inference_tp_size`).",
    )
    tp_gather_partition_size: Int = Field(
        default=8, ge=1, description="Layers gathered at one time when several ranks share them."
    )
    enable_cuda_graph: bool = Field(
        default=False, description="No effect: forwards are not captured as graphs."
    )
