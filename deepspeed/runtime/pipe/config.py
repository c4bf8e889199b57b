"""The `pipeline` section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from deepspeed.config.sections import Int, LenientConfigModel


class PipelineConfig(LenientConfigModel):
    """Pipeline engine. Keys that are not listed are handed to it as they are."""

    model_config = ConfigDict(extra="allow")

    stages: Any = Field(
        default="auto", description="Kept for old files; the pipeline module knows its stages."
    )
    partition: str = Field(
        default="best", description="Kept for old files; the pipeline module knows its partition."
    )
    schedule: Literal["1f1b", "zero-bubble"] = Field(
        default="1f1b",
        description="In which order stages work: one forward, one backward; or with backwards split in two, so that "
        "gradients of weights fill the waits.",
    )
    seed_layers: bool = Field(default=False, description="Seed the random state per layer.")
    activation_checkpoint_interval: Int = Field(
        default=0, ge=0, description="Layers per checkpointed region; 0: none."
    )
    pipe_partitioned: bool = Field(
        default=True, description="Partition activations across the model-parallel ranks while they are sent."
    )
    grad_partitioned: bool = Field(default=True, description="Partition their gradients in the same way.")
    use_reentrant: bool = Field(
        default=True, description="Which variant of activation checkpointing is used."
    )
