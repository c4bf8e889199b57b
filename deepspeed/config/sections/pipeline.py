"""The `pipeline` section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, field_validator

from deepspeed.config.section import Int, LenientConfigModel, key


class PipelineConfig(LenientConfigModel):
    """Pipeline engine. Keys that are not listed are handed to it as they are."""

    model_config = ConfigDict(extra="allow")

    stages: Any = key("auto", "Kept for old files; the pipeline module knows its stages.")
    partition: str = key("best", "Kept for old files; the pipeline module knows its partition.")
    schedule: Literal["1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "auto"] = key(
        "1f1b",
        "In which order stages work: one forward, one backward; the same over several chunks per stage "
        "(`PipelineModule(chunks=...)`); with backwards split in two, so that gradients of weights fill the waits; "
        "this over chunks that go forth and back (`zigzag=True`); or the best of these for measured durations.",
        json_schema_extra={"takes_auto": True},
    )
    max_held: Int = key(
        0,
        "Of how many micro-batches a stage may hold activations with split backwards; 0: as many as there "
        "are stages, which is what 1F1B holds.",
        ge=0,
    )
    seed_layers: bool = key(False, "Seed the random state per layer.")
    activation_checkpoint_interval: Int = key(0, "Layers per checkpointed region; 0: none.", ge=0)
    pipe_partitioned: bool = key(True, "No effect: each rank sends to its like in the next stage.")
    grad_partitioned: bool = key(True, "No effect, likewise.")
    use_reentrant: bool = key(True, "Which variant of activation checkpointing is used.")

    @field_validator("schedule", mode="before")
    @classmethod
    def any_case(cls, value: Any) -> Any:
        """Published files write "1F1B", as the paper does; release 0.19 does not look at the key."""
        return value.lower() if isinstance(value, str) else value
