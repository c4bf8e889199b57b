"""`zero_optimization.zenflow`: important gradient columns immediately on the device, the rest later on the
host.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deepspeed.config.section import DeepSpeedConfigModel, Float, Int, IntOrAuto


class ZenFlowConfig(DeepSpeedConfigModel):
    """Asynchronous offloaded updates (ZenFlow)."""

    topk_ratio: Float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="Fraction of the gradient columns that are updated on the device.",
    )
    select_strategy: Literal["auto", "step", "epoch"] = Field(
        default="auto", description="When the columns are selected again."
    )
    select_interval: IntOrAuto = Field(default="auto", description="Steps or epochs between two selections.")
    update_interval: IntOrAuto = Field(default="auto", description="Steps between two host updates.")
    overlap_step: bool = Field(
        default=False,
        description="Run the host update in parallel with the next steps.",
    )
    offload: bool = Field(default=False, description="Keep the state of the chosen columns in host memory.")
    auto_ratio: Float = Field(
        default=0.99, ge=0.0, le=1.0, description="Threshold that `update_interval: auto` aims at."
    )
    full_warm_up_rounds: Int = Field(
        default=0, ge=0, description="Number of initial rounds in which everything is updated."
    )
    pt_reserved_cores_perc: Float = Field(
        default=0.5, ge=0.0, le=1.0, description="Fraction of the cores left to PyTorch."
    )
    steps_per_epoch: Int | None = Field(default=None, description="Filled in by the engine; not for users.")
