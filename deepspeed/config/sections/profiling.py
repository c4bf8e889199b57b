"""The sections `flops_profiler`, `timers` and `trace`."""

from __future__ import annotations

from pydantic import Field, field_validator

from deepspeed.config.section import DeepSpeedConfigModel, Float, Int, LenientConfigModel, key, section


class DeepSpeedFlopsProfilerConfig(LenientConfigModel):
    """One-shot profile of FLOPs, parameters and time per module."""

    enabled: bool = key(False, "Turn it on; also turns on `wall_clock_breakdown`.")
    recompute_fwd_factor: Float = key(
        0.0, "Fraction of the forward that checkpointing recomputes; included in the total.", ge=0.0, le=1.0
    )
    profile_step: Int = key(1, "Optimizer step to profile; -1: none.", ge=-1)
    module_depth: Int = key(-1, "Module depth to summarize; -1: the innermost.", ge=-1)
    top_modules: Int = key(1, "Number of most expensive modules to list per depth.", ge=0)
    detailed: bool = key(True, "Print the whole module tree.")
    output_file: str | None = key(None, "File for the report; null: standard output.")


class DeepSpeedThroughputTimerConfig(DeepSpeedConfigModel):
    """Samples per second."""

    enabled: bool = key(True, "Turn it on.")
    synchronized: bool = key(True, "Synchronize the device before each reading.")


class TimersConfig(LenientConfigModel):
    """Timers that run all the time."""

    throughput: DeepSpeedThroughputTimerConfig = section("The throughput timer.")


class TraceConfig(DeepSpeedConfigModel):
    """A timeline of some steps, for chrome://tracing, Perfetto and `ds trace`."""

    path: str = Field(min_length=1, description="Folder for one file per rank.")
    steps: list[Int] = key(
        [2, 4], "First and last optimizer step of the timeline.", min_length=2, max_length=2
    )
    operations: bool = key(
        True, "Also record torch's operations and the kernels of the device, through `torch.profiler`."
    )

    @field_validator("steps")
    @classmethod
    def steps_are_in_order(cls, steps: list[int]) -> list[int]:
        if not 1 <= steps[0] <= steps[1]:
            raise ValueError("must be two steps, counted from 1, the first not after the last")
        return steps


# The section `audit`: what `ds diff` compares.


class AuditConfig(DeepSpeedConfigModel):
    """Record what each step computed, for `ds diff`, and prove that gradients are summed right."""

    record: str = Field(
        min_length=1, description="Folder for one file per rank; files of an earlier run are replaced."
    )
    first_step: Int = key(1, "First optimizer step to record.", ge=1)
    steps: Int = key(10, "Number of steps to record.", ge=1)
    stride: Int = key(1, "Record every nth step.", ge=1)
    prove_buckets: Int = key(
        1,
        "Number of gradient buckets per recorded step, in turn, to compare with a plain all-reduce of the gradients.",
        ge=0,
    )

    def wants(self, step: int) -> bool:
        """Return whether this step (counted from 1) is recorded."""
        behind = step - self.first_step
        return behind >= 0 and behind % self.stride == 0 and behind // self.stride < self.steps

    @property
    def last_step(self) -> int:
        return self.first_step + (self.steps - 1) * self.stride
