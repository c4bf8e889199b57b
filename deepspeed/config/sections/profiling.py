"""The sections `flops_profiler`, `timers` and `trace`."""

from __future__ import annotations

from pydantic import Field, field_validator

from deepspeed.config.section import DeepSpeedConfigModel, Float, Int, LenientConfigModel, section


class DeepSpeedFlopsProfilerConfig(LenientConfigModel):
    """One-shot profile of FLOPs, parameters and time per module."""

    enabled: bool = Field(default=False, description="Turn it on; also turns on `wall_clock_breakdown`.")
    recompute_fwd_factor: Float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Fraction of the forward that checkpointing recomputes; included in the total.",
    )
    profile_step: Int = Field(default=1, ge=-1, description="Optimizer step that is profiled; -1: none.")
    module_depth: Int = Field(
        default=-1, ge=-1, description="Depth of the modules that are summarized; -1: the innermost."
    )
    top_modules: Int = Field(
        default=1, ge=0, description="How many of the most expensive modules are listed per depth."
    )
    detailed: bool = Field(default=True, description="Print the whole module tree.")
    output_file: str | None = Field(default=None, description="File for the report; null: standard output.")


class DeepSpeedThroughputTimerConfig(DeepSpeedConfigModel):
    """Samples per second."""

    enabled: bool = Field(default=True, description="Turn it on.")
    synchronized: bool = Field(default=True, description="Wait for the device before each reading.")


class TimersConfig(LenientConfigModel):
    """Timers that run all the time."""

    throughput: DeepSpeedThroughputTimerConfig = section(
        DeepSpeedThroughputTimerConfig, "The throughput timer."
    )


class TraceConfig(DeepSpeedConfigModel):
    """A timeline of some steps, for chrome://tracing, Perfetto and `ds trace`."""

    path: str = Field(min_length=1, description="Folder for one file per rank.")
    steps: list[Int] = Field(
        default=[2, 4],
        min_length=2,
        max_length=2,
        description="First and last optimizer step of the timeline.",
    )
    operations: bool = Field(
        default=True,
        description="Also record torch's operations and the kernels of the device, through `torch.profiler`.",
    )

    @field_validator("steps")
    @classmethod
    def steps_are_in_order(cls, steps: list[int]) -> list[int]:
        if not 1 <= steps[0] <= steps[1]:
            raise ValueError("must be two steps, counted from 1, the first not after the last")
        return steps
