"""The `pipeline` section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from deepspeed.config.section import Int, LenientConfigModel


class PipelineConfig(LenientConfigModel):
    """Pipeline engine. Keys that are not listed are handed to it as they are."""

    model_config = ConfigDict(extra="allow")

    stages: Any = Field(
        default="auto", description="Kept for old files; the pipeline module knows its stages."
    )
    partition: str = Field(
        default="best", description="Kept for old files; the pipeline module knows its partition."
    )
    schedule: Literal["1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "auto"] = Field(
        default="1f1b",
        description="In which order stages work: one forward, one backward; the same over several chunks per stage "
        "(`PipelineModule(chunks=...)`); with backwards split in two, so that gradients of weights fill the waits; "
        "this over chunks that go forth and back (`zigzag=True`); or the best of these for measured durations.",
        json_schema_extra={"takes_auto": True},
    )
    max_held: Int = Field(
        default=0,
        ge=0,
        description="Of how many micro-batches a stage may hold activations with split backwards; 0: as many as there "
        "are stages, which is what 1F1B holds.",
    )
    seed_layers: bool = Field(default=False, description="Seed the random state per layer.")
    activation_checkpoint_interval: Int = Field(
        default=0, ge=0, description="Layers per checkpointed region; 0: none."
    )
    pipe_partitioned: bool = Field(
        default=True, description="No effect: each rank sends to its like in the next stage."
    )
    grad_partitioned: bool = Field(default=True, description="No effect, likewise.")
    use_reentrant: bool = Field(
        default=True, description="Which variant of activation checkpointing is used."
    )

    @field_validator("schedule", mode="before")
    @classmethod
    def any_case(cls, value: Any) -> Any:
        """Published files write "1F1B", as the paper does; release 0.19 does not look at the key."""
        return value.lower() if isinstance(value, str) else value
