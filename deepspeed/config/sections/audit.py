"""The section `audit`: what `ds diff` compares."""

from __future__ import annotations

from pydantic import Field

from deepspeed.config.section import DeepSpeedConfigModel, Int, key


class AuditConfig(DeepSpeedConfigModel):
    """Record what each step computed, for `ds diff`, and prove that gradients are summed right."""

    record: str = Field(
        min_length=1, description="Folder for one file per rank; files of an earlier run are replaced."
    )
    first_step: Int = key(1, "First optimizer step to record.", ge=1)
    steps: Int = key(10, "Number of steps to record.", ge=1)
    stride: Int = key(1, "Record one out of this many steps.", ge=1)
    prove_buckets: Int = key(
        1,
        "Gradient buckets per recorded step, in turn, whose sum is compared with a plain all-reduce of the "
        "ranks' gradients.",
        ge=0,
    )

    def wants(self, step: int) -> bool:
        """Tell whether this step (counted from 1) is recorded."""
        behind = step - self.first_step
        return behind >= 0 and behind % self.stride == 0 and behind // self.stride < self.steps

    @property
    def last_step(self) -> int:
        return self.first_step + (self.steps - 1) * self.stride
