"""The section `audit`: what `ds diff` compares."""

from __future__ import annotations

from pydantic import Field

from deepspeed.config.section import DeepSpeedConfigModel, Int


class AuditConfig(DeepSpeedConfigModel):
    """Record what each step computed, for `ds diff`, and prove that gradients are summed right."""

    record: str = Field(
        min_length=1, description="Folder for one file per rank; files of an earlier run are replaced."
    )
    first_step: Int = Field(default=1, ge=1, description="First optimizer step to record.")
    steps: Int = Field(default=10, ge=1, description="Number of steps to record.")
    stride: Int = Field(default=1, ge=1, description="Record one out of this many steps.")
    prove_buckets: Int = Field(
        default=1,
        ge=0,
        description="Gradient buckets per recorded step, in turn, whose sum is compared with a plain all-reduce of the "
        "ranks' gradients.",
    )

    def wants(self, step: int) -> bool:
        """Tell whether this step (counted from 1) is recorded."""
        behind = step - self.first_step
        return behind >= 0 and behind % self.stride == 0 and behind // self.stride < self.steps

    @property
    def last_step(self) -> int:
        return self.first_step + (self.steps - 1) * self.stride
